//! `limiter validate`, and the check that it shares with the start of the agent.

use std::path::Path;

use super::{ConfigArg, report, say, warn};
use crate::{
    config::{Config, ConfigErrors, Environment},
    exit::Exit,
    identity::KeyStore,
    policy::Policy,
};

/// Everything that the agent reads before it starts.
#[derive(Debug)]
#[non_exhaustive]
pub struct Checked {
    pub config: Config,
    pub policy: Policy,
    pub keys: KeyStore,
    /// What is right and yet may surprise.
    pub notes: Vec<String>,
}

/// Reads configuration, policy and API keys, and reports the mistakes of all of them at once.
pub fn check(path: &Path, environment: Environment) -> Result<Checked, ConfigErrors> {
    let configuration = Config::check(path, environment);
    let mut errors = configuration.errors;
    let mut keep = |found: ConfigErrors| errors.extend(found);
    let policy = configuration.policy_file.and_then(|file| Policy::load(&file).map_err(&mut keep).ok());
    let keys = configuration.config.as_ref().and_then(|config| {
        KeyStore::load(&config.identity.key_file, &config.identity.key_secret_file).map_err(&mut keep).ok()
    });
    if let (Some(keys), Some(policy)) = (&keys, &policy) {
        keep(keys.check_plans(policy));
    }
    match (configuration.config, policy, keys) {
        (Some(config), Some(policy), Some(keys)) if errors.is_empty() => {
            let notes = notes(&config, &policy);
            Ok(Checked { config, policy, keys, notes })
        }
        _ => Err(errors),
    }
}

fn notes(config: &Config, policy: &Policy) -> Vec<String> {
    let mut notes = Vec::new();
    let of_packets = policy.packet_rules.len() + policy.allow.len() + policy.deny.len();
    if config.xdp.interfaces.is_empty() && of_packets > 0 {
        notes.push(format!(
            "xdp.interfaces is empty, so {} packet rules, {} allow and {} deny prefixes do not act on packets here",
            policy.packet_rules.len(),
            policy.allow.len(),
            policy.deny.len()
        ));
    }
    notes
}

pub fn run(arguments: &ConfigArg) -> Exit {
    match check(&arguments.config, Environment::of_process()) {
        Ok(checked) => {
            for note in &checked.notes {
                warn(format_args!("note: {note}"));
            }
            let Checked { config, policy, keys, .. } = &checked;
            let summary = format_args!(
                "{} and {} are valid: {} rules, {} packet rules, {} endpoint groups, {} plans, {} API keys",
                config.path.display(),
                config.policy.file.display(),
                policy.rules.len(),
                policy.packet_rules.len(),
                policy.endpoints.len(),
                policy.plans.len(),
                keys.len()
            );
            say(summary).err().unwrap_or(Exit::Ok)
        }
        Err(errors) => report(&errors),
    }
}
