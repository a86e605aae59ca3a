//! Logs go to standard error, as text, or as JSON with `LIMITER_LOG_FORMAT=json`.
//!
//! `LIMITER_LOG` chooses levels, as `tracing_subscriber`'s `EnvFilter` reads them: `info`, and for single targets what it
//! says. ERROR: the agent cannot do its work. WARN: an operator should look. INFO: transitions. Addresses of clients appear
//! at DEBUG, but for the sources that events of the XDP program name.

use std::io;

use tracing_subscriber::{EnvFilter, filter::LevelFilter};

use crate::config::{ConfigErrors, Environment};

const LEVELS: &str = "LIMITER_LOG";
const FORMAT: &str = "LIMITER_LOG_FORMAT";
const DEFAULT: &str = "info";

/// What is wrong with the variables: a log that says nothing, or not in the form that others read, is noticed too late.
pub fn check(environment: &Environment) -> ConfigErrors {
    let mut errors = ConfigErrors::new();
    for (name, check) in [
        (LEVELS, filter as fn(&str) -> Result<EnvFilter, String>),
        (FORMAT, |text| is_json(text).map(|_| EnvFilter::default())),
    ] {
        let wrong = match environment.get(name).map(|value| value.to_str()) {
            None => continue,
            Some(Some(text)) => check(text).err(),
            Some(None) => Some("is not text".to_owned()),
        };
        if let Some(message) = wrong {
            errors.extend(ConfigErrors::of_variable(name, message));
        }
    }
    errors
}

/// Begins to log as the variables say, which were checked.
pub fn init(environment: &Environment) {
    let text = |name| environment.get(name).and_then(|value| value.to_str()).unwrap_or_default();
    let filter = filter(text(LEVELS)).unwrap_or_else(|_checked_before| EnvFilter::new(DEFAULT));
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).with_ansi(false);
    if is_json(text(FORMAT)).unwrap_or_default() {
        subscriber.json().init();
    } else {
        subscriber.init();
    }
}

/// Of targets that are not named, `info` stays.
fn filter(text: &str) -> Result<EnvFilter, String> {
    const WANTED: &str =
        "levels are off, error, warn, info, debug and trace, as in \"debug\" or \"info,limiter::store=debug\"";
    // By itself a word that is no level would be a target, and silence all others.
    let directives: Vec<_> = text.split(',').map(str::trim).filter(|directive| !directive.is_empty()).collect();
    for directive in &directives {
        let (_, level) = directive.rsplit_once('=').unwrap_or(("", directive));
        if level.parse::<LevelFilter>().is_err() {
            return Err(format!("\"{directive}\" names no level: {WANTED}"));
        }
    }
    let has_level = directives.iter().any(|directive| !directive.contains('='));
    let default = if has_level { None } else { Some(DEFAULT) };
    let directives: Vec<_> = default.into_iter().chain(directives).collect();
    EnvFilter::try_new(directives.join(",")).map_err(|error| format!("{error}: {WANTED}"))
}

fn is_json(text: &str) -> Result<bool, String> {
    match text {
        "json" => Ok(true),
        "" | "text" => Ok(false),
        other => Err(format!("\"{other}\" is neither \"text\" nor \"json\"")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_that_would_silence_the_log_is_a_mistake() {
        for (name, value, says) in [
            (LEVELS, "", ""),
            (LEVELS, "debug", ""),
            (LEVELS, "WARN", ""),
            (LEVELS, "limiter::store=debug, hyper=off", ""),
            (LEVELS, "blah", "LIMITER_LOG: \"blah\" names no level: levels are off, error"),
            (LEVELS, "info,limiter::store=loud", "\"limiter::store=loud\" names no level"),
            (LEVELS, "limiter::store", "names no level"),
            (FORMAT, "json", ""),
            (FORMAT, "text", ""),
            (FORMAT, "", ""),
            (FORMAT, "yaml", "LIMITER_LOG_FORMAT: \"yaml\" is neither \"text\" nor \"json\""),
        ] {
            let said = check(&[(name, value)].into_iter().collect()).to_string();
            assert!(said.contains(says) && said.is_empty() == says.is_empty(), "{name}={value}: {said}");
        }
        assert_eq!(filter("limiter::store=debug").unwrap().max_level_hint(), Some(LevelFilter::DEBUG));
        assert_eq!(filter("").unwrap().max_level_hint(), Some(LevelFilter::INFO));
        assert_eq!(filter("error").unwrap().max_level_hint(), Some(LevelFilter::ERROR));
    }
}
