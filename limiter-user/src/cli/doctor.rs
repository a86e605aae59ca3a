//! `limiter doctor`.

use std::fmt::{self, Write};

use super::{DoctorArgs, say};
use crate::{
    doctor::{self, Finding, Status},
    exit::Exit,
};

pub(super) fn run(arguments: &DoctorArgs) -> Exit {
    let findings = doctor::examine(&arguments.config.config);
    let mut text = String::new();
    let written = match arguments.json {
        true => serde_json::to_string_pretty(&findings).map(|json| text = json).is_ok(),
        false => describe(&findings, &mut text).is_ok(),
    };
    if !written {
        return Exit::Internal;
    }
    say(text.trim_end()).err().unwrap_or_else(|| doctor::exit(&findings))
}

fn describe(findings: &[Finding], out: &mut String) -> fmt::Result {
    const INDENT: &str = "         ";
    let width = findings.iter().map(|finding| finding.check.len()).max().unwrap_or_default();
    for finding in findings {
        let Finding { check, status, found, why, remedy } = finding;
        let found = found.replace('\n', &format!("\n{INDENT}{:width$}  ", ""));
        writeln!(out, "{:<8} {check:<width$}  {found}", status.as_str())?;
        if *status != Status::Ok {
            writeln!(out, "{INDENT}why: {why}")?;
        }
        if let Some(remedy) = remedy {
            writeln!(out, "{INDENT}remedy: {remedy}")?;
        }
    }
    let count = |is: fn(&Status) -> bool| findings.iter().filter(|finding| is(&finding.status)).count();
    let (warnings, errors) = (count(|s| *s == Status::Warning), count(|s| matches!(s, Status::Error(_))));
    writeln!(out, "{} checks: {errors} errors, {warnings} warnings", findings.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_well_has_its_reason_and_remedy() {
        let finding = |status, found: &str, remedy: Option<&str>| Finding {
            check: "redis",
            status,
            found: found.into(),
            why: "it matters",
            remedy: remedy.map(str::to_owned),
        };
        let mut text = String::new();
        let findings = [
            finding(Status::Ok, "answers", None),
            finding(Status::Error(Exit::Unavailable), "one\ntwo", Some("start it")),
        ];
        describe(&findings, &mut text).unwrap();
        let expected = "ok       redis  answers\n\
                        error    redis  one\n                two\n         why: it matters\n         remedy: start it\n\
                        2 checks: 1 errors, 0 warnings\n";
        assert_eq!(text, expected);
    }
}
