//! The real binary, started with a configuration of the test's own.

use std::{
    fs::{self, File},
    os::unix::{fs::chown, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Output, Stdio},
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tempfile::TempDir;

use crate::{
    eventually::until,
    http::{self, Address, Response},
};

/// Start and stop of an agent, on a machine that is busy with other tests.
pub const START: Duration = Duration::from_secs(20);

/// The binary that `cargo xtask build` made.
pub fn binary() -> PathBuf {
    std::env::var_os("LIMITER_BIN").expect("LIMITER_BIN is not set: run the tests with \"cargo xtask test\"").into()
}

/// A folder with configuration, policy and sockets; removed when dropped.
#[derive(Debug)]
pub struct Setup {
    folder: TempDir,
    /// What the binary is started by: arguments of `setpriv`.
    privileges: Option<Vec<String>>,
}

impl Setup {
    /// `configuration` is what follows the tables `[api]` and `[policy]`, which are the harness's: sockets in the
    /// folder, and `policy` beside them.
    pub fn new(configuration: &str, policy: &str) -> Self {
        let folder = TempDir::new().expect("a folder");
        let setup = Self { folder, privileges: None };
        setup.write("policy.toml", policy);
        setup.configure(configuration);
        setup
    }

    /// Writes another configuration, for the next start.
    pub fn configure(&self, configuration: &str) {
        let path = |name: &str| self.path(name).display().to_string();
        let configuration = format!(
            "[api]\nhttp = \"unix:{}\"\nadmin = \"unix:{}\"\n[policy]\nfile = \"policy.toml\"\n{configuration}",
            path("http.sock"),
            path("admin.sock"),
        );
        self.write("limiter.toml", &configuration);
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).expect("writing a file of the test");
    }

    /// Writes a file beside the one that is there, and puts it in its place.
    pub fn replace(&self, name: &str, text: &str) {
        let next = format!("{name}.next");
        self.write(&next, text);
        fs::rename(self.path(&next), self.path(name)).expect("renaming a file of the test");
    }

    /// Gives everything to a user, who runs the binary with these capabilities and can never have others.
    pub fn run_as(&mut self, user: u32, capabilities: &[&str]) {
        // The build may be where nobody else can look.
        fs::copy(binary(), self.path("limiter")).expect("a copy of the binary");
        chown(self.folder.path(), Some(user), Some(user)).expect("the folder is given away");
        for entry in fs::read_dir(self.folder.path()).expect("the folder").flatten() {
            chown(entry.path(), Some(user), Some(user)).expect("a file is given away");
        }
        let capabilities: String = capabilities.iter().map(|name| format!(",+{name}")).collect();
        let mut arguments = vec![format!("--reuid={user}"), format!("--regid={user}"), "--clear-groups".to_owned()];
        for set in ["inh-caps", "ambient-caps", "bounding-set"] {
            arguments.push(format!("--{set}=-all{capabilities}"));
        }
        self.privileges = Some(arguments);
    }

    /// A command of the binary with this configuration.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = match &self.privileges {
            None => Command::new(binary()),
            Some(privileges) => {
                let mut setpriv = Command::new("setpriv");
                setpriv.args(privileges).arg(self.path("limiter"));
                setpriv
            }
        };
        command.args(arguments).arg("--config").arg(self.path("limiter.toml")).stdin(Stdio::null());
        command
    }

    /// Runs a command of the binary to its end.
    pub fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().expect("running the binary")
    }

    /// Adds an API key, and gives it as it was printed.
    pub fn add_key(&self, client: &str, plan: &str) -> String {
        let mut add = self.command(&["keys", "add", "--client", client, "--plan", plan]);
        // A Ctrl-C is for who started this, and a key that is half added helps nobody.
        let output = add.process_group(0).output().expect("running the binary");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).expect("text").trim().to_owned()
    }

    pub fn http(&self) -> Address {
        Address::Unix(self.path("http.sock"))
    }

    pub fn admin(&self) -> Address {
        Address::Unix(self.path("admin.sock"))
    }

    /// Starts the agent without waiting for it.
    pub fn spawn(&self) -> Agent<'_> {
        let log = File::options().create(true).append(true).open(self.path("log")).expect("a log");
        let child = self.command(&["run"]).stdout(Stdio::null()).stderr(log).spawn().expect("starting the agent");
        Agent { child, setup: self }
    }

    /// Starts the agent and waits until it is ready.
    pub fn start(&self) -> Agent<'_> {
        let mut agent = self.spawn();
        until("the agent is ready", START, || {
            assert!(agent.is_running(), "the agent ended:\n{}", self.log());
            agent.is_ready().then_some(())
        });
        agent
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }
}

/// A running agent, killed when dropped.
#[derive(Debug)]
pub struct Agent<'a> {
    child: Child,
    setup: &'a Setup,
}

impl Agent<'_> {
    pub fn setup(&self) -> &Setup {
        self.setup
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("a child").is_none()
    }

    pub fn is_ready(&self) -> bool {
        http::get(&self.setup.admin(), "/readyz", &[]).is_ok_and(|response| response.status == 200)
    }

    /// `/v1/check` with the given headers.
    pub fn check(&self, headers: &[(&str, &str)]) -> Response {
        http::get(&self.setup.http(), "/v1/check", headers).expect("an answer")
    }

    /// `/v1/decide` with one question.
    pub fn decide(&self, question: serde_json::Value) -> serde_json::Value {
        let response = http::post(&self.setup.http(), "/v1/decide", &question).expect("an answer");
        assert_eq!(response.status, 200, "{response:?}");
        response.json()
    }

    pub fn status(&self) -> serde_json::Value {
        http::get(&self.setup.admin(), "/v1/status", &[]).expect("an answer").json()
    }

    /// Value of a metric, given with its labels as it is exposed; 0 when it is not there.
    pub fn metric(&self, series: &str) -> f64 {
        let text = http::get(&self.setup.admin(), "/metrics", &[]).expect("an answer").body;
        let value = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' ')?.parse().ok());
        value.unwrap_or_default()
    }

    /// `kill -9`: no chance to clean up.
    pub fn kill(mut self) {
        self.child.kill().expect("killing the agent");
        self.child.wait().expect("the agent ends");
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.child.id()).expect("a process id"));
        kill(pid, signal).expect("a signal");
    }

    /// How many times a policy was read again, by result.
    pub fn reloads(&self, result: &str) -> f64 {
        self.metric(&format!("limiter_policy_reloads_total{{result=\"{result}\"}}"))
    }

    /// Asks the agent to read its policy again, without waiting for it.
    pub fn hang_up(&self) {
        self.signal(Signal::SIGHUP);
    }

    /// Puts a policy in force, and waits until it is.
    pub fn reload(&self, policy: &str) {
        self.setup.replace("policy.toml", policy);
        let before = self.reloads("ok");
        self.hang_up();
        until("the policy is in force", START, || (self.reloads("ok") > before).then_some(()));
    }

    /// Asks the agent to stop, and waits until it has.
    pub fn stop(mut self) -> ExitStatus {
        self.signal(Signal::SIGTERM);
        until("the agent stops", START, || self.child.try_wait().expect("a child"))
    }
}

impl Drop for Agent<'_> {
    fn drop(&mut self) {
        // Already ended when `kill` or `stop` was called.
        if self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            drop(self.child.kill());
            drop(self.child.wait());
        }
    }
}

/// Whether a file is there; for conditions.
pub fn exists(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}
