//! What is wrong is said, with the right exit code, and leaves nothing behind.

use std::{fs, process::Output};

use limiter_tests::{
    agent::Setup,
    netns::{INTERFACE, TestNet},
};

struct Mistake {
    name: &'static str,
    configuration: String,
    policy: &'static str,
    exit: i32,
    /// All of these are said.
    says: &'static [&'static str],
}

fn mistake(
    name: &'static str,
    configuration: impl Into<String>,
    policy: &'static str,
    exit: i32,
    says: &'static [&'static str],
) -> Mistake {
    Mistake { name, configuration: configuration.into(), policy, exit, says }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn each_mistake_has_its_error_and_leaves_nothing_attached() {
    let net = TestNet::new();
    let pin_dir = net.pin_dir().display();
    let xdp = format!("[xdp]\ninterfaces = [\"{INTERFACE}\"]\npin_dir = \"{pin_dir}\"\n");
    let elsewhere = xdp.replace(INTERFACE, "nosuch0");
    let not_bpffs = format!("[xdp]\ninterfaces = [\"{INTERFACE}\"]\npin_dir = \"/tmp/limiter-not-bpffs\"\n");
    let taken = net.gateway(|| std::net::TcpListener::bind("127.0.0.1:7999")).expect("a port");
    let rule = "[[rules]]\nid = \"r\"\nscope = \"ip\"\nlimit = 5\nwindow = \"1s\"\n";
    for mistake in [
        mistake("broken TOML", format!("{xdp}[node\n"), rule, 78, &["limiter.toml:"]),
        mistake(
            "unknown fields",
            format!("{xdp}mod = \"auto\"\n[push]\nenable = true\n"),
            rule,
            78,
            &["mod", "enable"],
        ),
        mistake(
            "rate 0",
            &*xdp,
            "[[packet_rules]]\nid = \"p\"\ncidr = \"0.0.0.0/0\"\npackets = { rate = \"0/s\", burst = 5 }\n",
            78,
            &["policy.toml:4", "unlimited"],
        ),
        mistake(
            "limit 0",
            &*xdp,
            "[[rules]]\nid = \"r\"\nscope = \"ip\"\nlimit = 0\nwindow = \"1s\"\n",
            78,
            &["policy.toml:4", "unlimited"],
        ),
        mistake(
            "an endpoint that does not exist",
            &*xdp,
            "[[rules]]\nid = \"r\"\nscope = \"ip\"\nlimit = 5\nwindow = \"1s\"\nendpoint = \"nowhere\"\n",
            78,
            &["policy.toml:6", "nowhere"],
        ),
        mistake(
            "a packet rule for a part of a source",
            &*xdp,
            "[[packet_rules]]\nid = \"all\"\ncidr = \"::/0\"\npackets = { rate = \"9/s\", burst = 9 }\n\
             [[packet_rules]]\nid = \"one\"\ncidr = [\"2001:db8::/64\", \"2001:db8:1::7\"]\n\
             new_connections = { rate = \"5/s\" }\n\
             [[packet_rules]]\nid = \"counted\"\ncidr = \"2001:db8:2::/65\"\npackets = { rate = \"5/s\" }\n\
             mode = \"shadow\"\n",
            78,
            &["\"one\"", "2001:db8:1::7/128", "identity.ipv6_prefix = 64", "to 128", "\"counted\"", "to 65"],
        ),
        mistake(
            "a packet rule for a part of an IPv4 source",
            format!("{xdp}[identity]\nipv4_prefix = 24\n"),
            "[[packet_rules]]\nid = \"one\"\ncidr = \"192.0.2.7\"\npackets = { rate = \"9/s\", burst = 9 }\n",
            78,
            &["\"one\"", "192.0.2.7/32", "identity.ipv4_prefix = 24", "to 32"],
        ),
        mistake("an interface that does not exist", elsewhere, rule, 78, &["nosuch0", "ip link"]),
        mistake("pins outside a BPF file system", not_bpffs, rule, 69, &["/tmp/limiter-not-bpffs", "BPF file system"]),
        mistake(
            "mistakes in both files at once",
            format!("{xdp}mode = \"fast\"\n"),
            "deny = [\"10.0.0.1/8\"]\n",
            78,
            &["mode", "10.0.0.0/8"],
        ),
    ] {
        let setup = Setup::new(&mistake.configuration, mistake.policy);
        let output = net.gateway(|| setup.run(&["run"]));
        assert_eq!(output.status.code(), Some(mistake.exit), "{}: {output:?}", mistake.name);
        let said = said(&output);
        assert!(mistake.says.iter().all(|word| said.contains(word)), "{}: {said}", mistake.name);
        assert!(!limiter_tests::agent::exists(net.pin_dir()), "{}: something is pinned", mistake.name);
        assert!(
            !setup.path("http.sock").exists() && !setup.path("admin.sock").exists(),
            "{}: a socket stays",
            mistake.name
        );
    }

    let setup = Setup::new(&xdp, rule);
    setup.write(
        "limiter.toml",
        &format!("[api]\nhttp = \"127.0.0.1:7999\"\nadmin = \"127.0.0.1:0\"\n[policy]\nfile = \"policy.toml\"\n{xdp}"),
    );
    let output = net.gateway(|| setup.run(&["run"]));
    assert_eq!(output.status.code(), Some(69), "{output:?}");
    assert!(said(&output).contains("api.http") && said(&output).contains("127.0.0.1:7999"), "{output:?}");
    assert!(!limiter_tests::agent::exists(net.pin_dir()), "a port that is taken: something is pinned");
    drop(taken);

    let link = net.gateway(|| std::process::Command::new("ip").args(["link", "show", INTERFACE]).output()).expect("ip");
    assert!(!String::from_utf8_lossy(&link.stdout).contains("xdp"), "{link:?}");
}

#[test]
fn without_permission_nothing_is_attached() {
    use std::os::unix::{fs::PermissionsExt, process::CommandExt};
    const NOBODY: u32 = 65534;
    let net = TestNet::new();
    let setup =
        Setup::new(&format!("[xdp]\ninterfaces = [\"{INTERFACE}\"]\npin_dir = \"{}\"\n", net.pin_dir().display()), "");
    // Nobody may read and bind here, and so comes as far as loading the program.
    fs::set_permissions(setup.path(""), fs::Permissions::from_mode(0o777)).expect("a folder");
    let binary = setup.path("limiter");
    fs::copy(limiter_tests::agent::binary(), &binary).expect("a copy");
    let output = net.gateway(|| {
        let mut command = std::process::Command::new(&binary);
        command.args(["run", "--config"]).arg(setup.path("limiter.toml")).uid(NOBODY).gid(NOBODY).output()
    });
    let output = output.expect("running the binary");
    assert_eq!(output.status.code(), Some(77), "{output:?}");
    assert!(said(&output).contains("CAP_BPF"), "{output:?}");
    assert!(!limiter_tests::agent::exists(net.pin_dir()));
}

#[test]
fn commands_without_an_agent_say_how_to_start_one() {
    let setup = Setup::new("", "");
    for arguments in [&["status"][..], &["check", "--ip", "192.0.2.1"], &["block", "192.0.2.1"]] {
        let output = setup.run(arguments);
        assert_eq!(output.status.code(), Some(69), "{arguments:?}: {output:?}");
        assert!(said(&output).contains("limiter run"), "{output:?}");
    }
    assert_eq!(setup.run(&["unpin", "--surely"]).status.code(), Some(64));
}

#[test]
fn a_command_that_cannot_be_done_says_what_is_missing() {
    let setup = Setup::new("[identity]\nkey_file = \"none/keys.toml\"\nkey_secret_file = \"none/secret\"\n", "");
    for (arguments, variable, exit, says) in [
        (
            &["keys", "add"][..],
            ("", ""),
            78,
            "none/keys.toml: identity.key_file: its folder is not there: make it first",
        ),
        (&["check"], ("", ""), 64, "<--key <KEY>|--user <USER>|--session <VALUE>|--ip <ADDRESS>>"),
        (&["validate"], ("LIMITER_LOG", "blah"), 78, "variable LIMITER_LOG: \"blah\" names no level"),
        (&["run"], ("LIMITER_LOG_FORMAT", "yaml"), 78, "neither \"text\" nor \"json\""),
    ] {
        let mut command = setup.command(arguments);
        if !variable.0.is_empty() {
            command.env(variable.0, variable.1);
        }
        let output = command.output().expect("running the binary");
        assert_eq!(output.status.code(), Some(exit), "{arguments:?}: {output:?}");
        assert!(said(&output).contains(says), "{arguments:?}: {output:?}");
        assert!(!setup.path("none").exists());
    }
}

#[test]
fn validate_agrees_with_run_and_changes_nothing() {
    let setup = Setup::new("[push]\nmax_block = \"0s\"\n", "allow = [\"nonsense\"]\n");
    let output = setup.run(&["validate"]);
    assert_eq!(output.status.code(), Some(78));
    let said = said(&output);
    assert!(said.contains("max_block") && said.contains("allow"), "{said}");
    let good = Setup::new("", "");
    let output = good.run(&["validate"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
}
