//! The command line: what can be typed, and the commands that need no running agent.

mod acl;
mod check;
mod client;
mod doctor;
pub mod keys;
mod policy;
mod run;
mod status;
mod top;
mod unpin;
pub mod validate;

use std::{
    ffi::OsString,
    io::{self, Write},
    net::IpAddr,
    path::PathBuf,
    time::Duration,
};

use clap::{ArgGroup, Args, Parser, Subcommand, error::ErrorKind};
use ipnet::IpNet;

use crate::{
    api::admin::AclAction,
    config::{self, Config, ConfigErrors, Environment, prefix::prefix, units},
    dataplane::chain,
    exit::Exit,
    identity::api_key::id_from_hex,
    store::ApiKeyId,
};

const VERSION: &str = if cfg!(limiter_bpf_object) {
    concat!(env!("CARGO_PKG_VERSION"), "\nxdp object: embedded")
} else {
    concat!(env!("CARGO_PKG_VERSION"), "\nxdp object: absent")
};

/// Rate limits for packets and requests on a gateway host.
#[derive(Debug, Parser)]
#[command(name = "limiter", version = VERSION, arg_required_else_help = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the agent.
    Run(ConfigArg),
    /// Check configuration, policy and API keys, and say everything that is wrong.
    Validate(ConfigArg),
    /// Say what of this host would not work, and the remedy; changes nothing.
    Doctor(DoctorArgs),
    /// Show interfaces, counters by rule and reason, blocks, store and live nodes of the running agent.
    Status(StatusArgs),
    /// Show who sends most at this time, and of whom most is dropped.
    Top(TopArgs),
    /// Ask the running agent about a request, as a gateway would; ends with 0 whatever the answer.
    Check(CheckArgs),
    /// Drop packets from a prefix to the protected ports.
    Block(PrefixForArgs),
    /// Pass packets from a prefix, whatever the limits say.
    Allow(PrefixForArgs),
    /// Take back a block, and what the agent has pushed for addresses in the prefix.
    Unblock(PrefixArgs),
    /// Take back an allow.
    Unallow(PrefixArgs),
    /// Make, list, replace and end API keys.
    Keys(KeysArgs),
    /// Compare policies.
    Policy(PolicyArgs),
    /// Detach the XDP program and remove everything that is pinned; stop the agent first.
    Unpin(UnpinArgs),
}

#[derive(Clone, Debug, Args)]
pub struct ConfigArg {
    /// Configuration file.
    #[arg(long, value_name = "FILE", env = "LIMITER_CONFIG", default_value = config::DEFAULT_PATH)]
    pub config: PathBuf,
}

#[derive(Debug, Args)]
pub struct UnpinArgs {
    #[command(flatten)]
    pub config: ConfigArg,
    /// Do it while an agent runs, too: it goes on without limiting packets.
    #[arg(long)]
    pub force: bool,
}

#[derive(Debug, Args)]
pub struct StatusArgs {
    #[command(flatten)]
    pub config: ConfigArg,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct DoctorArgs {
    #[command(flatten)]
    pub config: ConfigArg,
    /// Print JSON: a list of {check, status, found, why, remedy}.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct TopArgs {
    #[command(flatten)]
    pub config: ConfigArg,
    /// Show it once, as without a terminal.
    #[arg(long)]
    pub once: bool,
    /// Print JSON, once.
    #[arg(long)]
    pub json: bool,
    /// How many of each list.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub rows: u16,
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("whose").args(["key", "user", "session", "ip"]).required(true).multiple(true))]
pub struct CheckArgs {
    #[command(flatten)]
    pub config: ConfigArg,
    /// API key that the request presents.
    #[arg(long, value_name = "KEY")]
    pub key: Option<String>,
    /// User that the gateway has authenticated itself.
    #[arg(long, conflicts_with = "key")]
    pub user: Option<String>,
    /// Value of the session cookie.
    #[arg(long, value_name = "VALUE", conflicts_with_all = ["key", "user"])]
    pub session: Option<String>,
    /// Plan of that user.
    #[arg(long, requires = "user")]
    pub plan: Option<String>,
    /// Address that the request comes from.
    #[arg(long, value_name = "ADDRESS")]
    pub ip: Option<IpAddr>,
    #[arg(long, default_value = "GET")]
    pub method: String,
    #[arg(long, default_value = "/")]
    pub path: String,
    /// An attribute that rules count by; can be given several times.
    #[arg(long = "attribute", value_name = "NAME=VALUE", value_parser = attribute)]
    pub attributes: Vec<(String, String)>,
    /// How much of each limit the request takes; 0 charges nobody, as --peek does, and less gives back.
    #[arg(long, default_value_t = 1, allow_negative_numbers = true)]
    pub cost: i64,
    /// Decide without charging anybody.
    #[arg(long)]
    pub peek: bool,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct PrefixArgs {
    #[command(flatten)]
    pub config: ConfigArg,
    /// An address or a prefix.
    #[arg(value_parser = prefix)]
    pub prefix: IpNet,
}

#[derive(Debug, Args)]
pub struct PrefixForArgs {
    #[command(flatten)]
    pub config: ConfigArg,
    /// An address or a prefix.
    #[arg(value_parser = prefix)]
    pub prefix: IpNet,
    /// How long, as in "10m"; until it is taken back, unless given.
    #[arg(long = "for", value_name = "DURATION", value_parser = units::duration)]
    pub duration: Option<Duration>,
}

#[derive(Debug, Args)]
#[command(arg_required_else_help = true)]
pub struct KeysArgs {
    #[command(subcommand)]
    pub command: KeysCommand,
}

#[derive(Debug, Subcommand)]
pub enum KeysCommand {
    /// Make a key and print it, this once.
    Add(KeysAddArgs),
    /// List ids, clients and plans.
    List(ConfigArg),
    /// End a key: it is answered with 401 from now on.
    Disable(KeysDisableArgs),
    /// Make a new key for the same client and plan and print it, this once; the old one ends later.
    Rotate(KeysRotateArgs),
    /// Put the keys of a key file into Redis, for all nodes: clients go on with the keys they have.
    Import(KeysImportArgs),
}

#[derive(Debug, Args)]
pub struct KeysImportArgs {
    #[command(flatten)]
    pub config: ConfigArg,
    /// Key file, hashed with the secret of this host; identity.key_file unless given.
    #[arg(value_name = "FILE")]
    pub file: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct KeysDisableArgs {
    #[command(flatten)]
    pub config: ConfigArg,
    /// Id of the key, as "keys list" shows it.
    #[arg(value_name = "ID", value_parser = key_id)]
    pub id: ApiKeyId,
}

#[derive(Debug, Args)]
pub struct KeysRotateArgs {
    #[command(flatten)]
    pub config: ConfigArg,
    /// Id of the key that is to be replaced, as "keys list" shows it.
    #[arg(value_name = "ID", value_parser = key_id)]
    pub id: ApiKeyId,
    /// How long the old key is valid beside the new one.
    #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = units::duration)]
    pub grace: Duration,
}

fn key_id(text: &str) -> Result<ApiKeyId, &'static str> {
    id_from_hex(text).ok_or("an id has 32 hexadecimal digits: \"limiter keys list\" shows them")
}

#[derive(Debug, Args)]
#[command(arg_required_else_help = true)]
pub struct PolicyArgs {
    #[command(subcommand)]
    pub command: PolicyCommand,
}

#[derive(Debug, Subcommand)]
pub enum PolicyCommand {
    /// Show what a file would change in the policy in force, and for how many clients that the running agent knows;
    /// without an agent, in the configured policy. Ends with 0 whether anything differs or not.
    Diff(PolicyDiffArgs),
}

#[derive(Debug, Args)]
pub struct PolicyDiffArgs {
    #[command(flatten)]
    pub config: ConfigArg,
    /// The policy file that would be put in force. The configured one, unless given: why a reload was refused, and what
    /// it would change.
    #[arg(value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Print JSON: {differs, compared_with, agent, changes}.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct KeysAddArgs {
    #[command(flatten)]
    pub config: ConfigArg,
    /// Whose key it is; keys of one client share its "user" limits. A new client unless given.
    #[arg(long, value_name = "CLIENT")]
    pub client: Option<String>,
    /// Plan of the policy.
    #[arg(long, value_name = "PLAN")]
    pub plan: Option<String>,
}

impl Cli {
    /// Does what was typed.
    pub fn run(self) -> Exit {
        match self.command {
            Command::Validate(arguments) => validate::run(&arguments),
            Command::Doctor(arguments) => doctor::run(&arguments),
            Command::Keys(arguments) => keys::run(&arguments),
            Command::Policy(PolicyArgs { command: PolicyCommand::Diff(arguments) }) => {
                finish(ask(policy::diff(&arguments)))
            }
            Command::Run(arguments) => finish(run::run(&arguments)),
            Command::Unpin(arguments) => finish(unpin::unpin(&arguments)),
            Command::Status(arguments) => finish(ask(status::status(&arguments))),
            Command::Top(arguments) => finish(ask(top::top(&arguments))),
            Command::Check(arguments) => finish(ask(check::check(&arguments))),
            Command::Block(arguments) => change(AclAction::Block, arguments.into()),
            Command::Allow(arguments) => change(AclAction::Allow, arguments.into()),
            Command::Unblock(arguments) => change(AclAction::Unblock, arguments.into()),
            Command::Unallow(arguments) => change(AclAction::Unallow, arguments.into()),
        }
    }

    /// Reads the arguments, the name of the program first. Help, the version and mistakes are printed here; the error is
    /// how the program ends.
    pub fn from_arguments(arguments: impl IntoIterator<Item = OsString>) -> Result<Self, Exit> {
        Self::try_parse_from(arguments).map_err(|error| {
            // Nobody is left to tell when it cannot be printed.
            error.print().unwrap_or_default();
            exit_of(&error)
        })
    }
}

fn attribute(text: &str) -> Result<(String, String), &'static str> {
    let (name, value) = text.split_once('=').ok_or("is not NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

fn change(action: AclAction, arguments: acl::Change) -> Exit {
    finish(ask(acl::change(action, &arguments)))
}

/// Runs one question to the agent.
fn ask(question: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(question)
}

/// Reports an error, and says how the program ends.
fn finish(result: anyhow::Result<()>) -> Exit {
    match result {
        Ok(()) => Exit::Ok,
        Err(error) => {
            warn(chain(error.as_ref()));
            Exit::from(&error)
        }
    }
}

impl ConfigArg {
    /// The configuration alone, for commands that ask a running agent.
    fn load(&self) -> anyhow::Result<Config> {
        Ok(Config::load(&self.config, Environment::of_process())?)
    }
}

fn exit_of(error: &clap::Error) -> Exit {
    let is_asked_for = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
    if is_asked_for { Exit::Ok } else { Exit::Usage }
}

/// Prints to standard output; a reader that has gone away is no failure.
fn say(text: impl std::fmt::Display) -> Result<(), Exit> {
    match writeln!(io::stdout().lock(), "{text}") {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(Exit::Internal),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// As [`say`], for commands that end with an error of their own.
fn print(text: impl std::fmt::Display) -> anyhow::Result<()> {
    say(text).map_err(|_exit| anyhow::anyhow!("writing to standard output failed"))
}

/// Prints to standard error, where there is nothing to do about a failure.
fn warn(text: impl std::fmt::Display) {
    writeln!(io::stderr().lock(), "{text}").unwrap_or_default();
}

/// Prints every mistake, and says how the program ends.
pub fn report(errors: &ConfigErrors) -> Exit {
    warn(errors);
    errors.exit()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Command, Exit> {
        Cli::try_parse_from(line.split_whitespace()).map(|cli| cli.command).map_err(|error| exit_of(&error))
    }

    #[test]
    fn every_command_of_the_contract_is_understood() {
        for line in [
            "limiter run",
            "limiter run --config /tmp/limiter.toml",
            "limiter validate",
            "limiter doctor",
            "limiter doctor --config F --json",
            "limiter status --json",
            "limiter top",
            "limiter top --once --json --rows 5",
            "limiter check --key K --path /x",
            "limiter check --session s_1 --path /x",
            "limiter check --ip 192.0.2.1 --method POST --path /x --cost 5 --peek",
            "limiter check --key K --cost 0",
            "limiter check --key K --cost -2",
            "limiter check --ip 192.0.2.1 --attribute tenant=x --attribute region=a=b",
            "limiter block 192.0.2.0/24 --for 10m",
            "limiter block 192.0.2.1",
            "limiter allow 2001:db8::/32",
            "limiter unblock 192.0.2.0/24",
            "limiter unallow 192.0.2.0/24 --config F",
            "limiter keys add --client c_1 --plan free",
            "limiter keys add --plan free --config F",
            "limiter keys list",
            "limiter policy diff F",
            "limiter policy diff F --config G --json",
            "limiter keys disable 00112233445566778899aabbccddeeff",
            "limiter keys rotate 00112233445566778899aabbccddeeff --grace 1h",
            "limiter unpin",
            "limiter unpin --force",
        ] {
            assert!(parse(line).is_ok(), "{line}");
        }
        let Ok(Command::Block(args)) = parse("limiter block 192.0.2.0/24 --for 10m") else { panic!("not a block") };
        assert_eq!(args.prefix, "192.0.2.0/24".parse().unwrap());
        assert_eq!(args.duration, Some(Duration::from_secs(600)));
    }

    #[test]
    fn usage_errors_are_64_and_help_is_not_one() {
        for (line, exit) in [
            ("limiter --version", Exit::Ok),
            ("limiter --help", Exit::Ok),
            ("limiter run --help", Exit::Ok),
            ("limiter", Exit::Usage),
            ("limiter keys", Exit::Usage),
            ("limiter policy", Exit::Usage),
            ("limiter keys disable lk_1", Exit::Usage),
            ("limiter fly", Exit::Usage),
            ("limiter run --fast", Exit::Usage),
            ("limiter block", Exit::Usage),
            ("limiter block 192.0.2.1/24", Exit::Usage),
            ("limiter block 192.0.2.1 --for 10", Exit::Usage),
            ("limiter block 192.0.2.1 --for 0s", Exit::Usage),
            ("limiter check --path /x", Exit::Usage),
            ("limiter check --key K --cost one", Exit::Usage),
            ("limiter check --key K --attribute tenant", Exit::Usage),
            ("limiter check --key K --session s_1", Exit::Usage),
            ("limiter top --rows 0", Exit::Usage),
        ] {
            assert_eq!(parse(line).err(), Some(exit), "{line}");
        }
    }
}
