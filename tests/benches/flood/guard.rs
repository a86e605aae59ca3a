//! What stands between the flood and the server: the same limit per source in every way that there is.

use std::{
    io::Write as _,
    process::{Command, Stdio},
};

use aya::{
    Ebpf,
    programs::{Xdp, XdpMode as AttachMode},
};
use limiter_common::{
    quota::{Quota, Rate},
    rule::EnforcementMode::Enforce,
};
use limiter_tests::{
    fixture::World,
    netns::{INTERFACE, TestNet},
    object::xdp_object,
};
use limiter_user::dataplane::{DataplaneConfig, KernelDataplane, Protect, Transport, XdpMode};

/// Of one source; one that sends more is dropped.
const RATE: u64 = 100;
const BURST: u64 = 200;
/// Good clients, which nothing limits.
const GOOD: &str = "10.203.0.0/24";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Guard {
    Nothing,
    Native,
    Generic,
    Nftables,
    Iptables,
    /// Drops the server's packets as well: the least that a packet can cost here.
    DropAll,
}

/// Ends the guard when dropped; the namespace ends its rules.
pub(crate) struct Standing {
    _dataplane: Option<KernelDataplane>,
    _object: Option<Ebpf>,
}

impl Guard {
    pub(crate) const ALL: [Self; 5] = [Self::Nothing, Self::Native, Self::Generic, Self::Nftables, Self::Iptables];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Nothing => "no limiter",
            Self::Native => "edge-limiter, native",
            Self::Generic => "edge-limiter, generic",
            Self::Nftables => "nftables",
            Self::Iptables => "iptables",
            Self::DropAll => "a program that drops everything",
        }
    }

    /// Puts it in front of the gateway of `net`.
    pub(crate) fn stand(self, net: &TestNet) -> Standing {
        let mut standing = Standing { _dataplane: None, _object: None };
        match self {
            Self::Nothing => {}
            Self::Native => standing._dataplane = Some(limiter(net, XdpMode::Native)),
            Self::Generic => standing._dataplane = Some(limiter(net, XdpMode::Generic)),
            Self::Nftables => feed(net, "nft", &["-f", "-"], &nftables()),
            Self::Iptables => feed(net, "iptables-restore", &[], &iptables()),
            Self::DropAll => {
                let mut object = crate::bench_object();
                let program: &mut Xdp =
                    object.program_mut("drop_all").expect("a program").try_into().expect("an XDP program");
                program.load().expect("the verifier accepts it");
                net.gateway(|| program.attach(INTERFACE, AttachMode::Driver).map(drop)).expect("attach it");
                standing._object = Some(object);
            }
        }
        standing
    }
}

fn limiter(net: &TestNet, mode: XdpMode) -> KernelDataplane {
    let mut world = World::new().rule("flood", "0.0.0.0/0", Enforce, &[]).allow(GOOD);
    let rate = Rate { count: RATE, per_ns: 1_000_000_000 };
    world.policy.packet_rules[0].packets = Some(Quota { rate, burst: BURST });
    let config = DataplaneConfig {
        interfaces: vec![INTERFACE.into()],
        mode,
        protect: Protect::Ports(vec![(Transport::Tcp, 80), (Transport::Udp, crate::FLOODED)]),
        pin_dir: net.pin_dir().to_owned(),
        max_sources: 65_536,
        ..world.config
    };
    net.gateway(|| KernelDataplane::start(xdp_object(), config, &world.policy, world.tuning))
        .expect("start the limiter")
}

/// In the ingress hook of the interface, before the kernel looks at the IP header: the earliest that nftables has.
fn nftables() -> String {
    let port = crate::FLOODED;
    format!(
        "table netdev flood {{
            set sources {{ type ipv4_addr; flags dynamic; size 65536; timeout 1m; }}
            chain ingress {{
                type filter hook ingress device {INTERFACE} priority -500; policy accept;
                ip saddr {GOOD} accept
                udp dport {port} update @sources {{ ip saddr limit rate over {RATE}/second burst {BURST} packets }} drop
                tcp dport 80 update @sources {{ ip saddr limit rate over {RATE}/second burst {BURST} packets }} drop
            }}
        }}\n"
    )
}

/// In the table `raw`, the earliest that iptables has.
fn iptables() -> String {
    let limit = format!(
        "-m hashlimit --hashlimit-above {RATE}/second --hashlimit-burst {BURST} --hashlimit-mode srcip \
         --hashlimit-name flood --hashlimit-htable-size 16384 --hashlimit-htable-max 65536"
    );
    format!(
        "*raw\n-A PREROUTING -s {GOOD} -j ACCEPT\n\
         -A PREROUTING -i {INTERFACE} -p udp --dport {} {limit} -j DROP\n\
         -A PREROUTING -i {INTERFACE} -p tcp --dport 80 {limit} -j DROP\nCOMMIT\n",
        crate::FLOODED
    )
}

/// Gives a program of the gateway its input, and waits for its end.
fn feed(net: &TestNet, program: &str, arguments: &[&str], input: &str) {
    let status = net.gateway(|| {
        let mut child = Command::new(program).args(arguments).stdin(Stdio::piped()).spawn().expect("start the program");
        child.stdin.take().expect("its input is piped").write_all(input.as_bytes()).expect("write its input");
        child.wait().expect("it ends")
    });
    assert!(status.success(), "{program}: {status}");
}
