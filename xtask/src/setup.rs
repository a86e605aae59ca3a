//! `cargo xtask setup`: a table of what building and testing need. Each row knows how to find it, how to install it and
//! what to tell a person where it cannot. Every other command ensures the rows it needs and is silent when they are met.

mod apt;
mod bpf_toolchain;
mod bpffs;
mod cargo_tool;
mod program;

use anyhow::{Result, bail};

use crate::setup::{apt::Apt, cargo_tool::CargoTool, program::Program};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Requirement {
    BpfToolchain,
    Bpffs,
    RedisServer,
    Ip,
    Curl,
    XdpFilter,
    Nft,
    Iptables,
    Wrk,
    Qemu,
    Nginx,
    Ethtool,
    Nextest,
    Fuzz,
    Deny,
}

impl Requirement {
    const ALL: [Self; 15] = [
        Self::BpfToolchain,
        Self::Bpffs,
        Self::RedisServer,
        Self::Ip,
        Self::Curl,
        Self::XdpFilter,
        Self::Nft,
        Self::Iptables,
        Self::Wrk,
        Self::Qemu,
        Self::Nginx,
        Self::Ethtool,
        Self::Nextest,
        Self::Fuzz,
        Self::Deny,
    ];

    /// What `cargo xtask test` needs.
    pub(crate) const TESTS: [Self; 6] =
        [Self::BpfToolchain, Self::Bpffs, Self::RedisServer, Self::Ip, Self::Curl, Self::Nextest];

    /// What `cargo xtask bench` needs beside that: the programs to compare with, and those that make and serve load.
    pub(crate) const BENCHES: [Self; 6] =
        [Self::XdpFilter, Self::Nft, Self::Iptables, Self::Wrk, Self::Nginx, Self::Ethtool];

    fn row(self) -> Row {
        match self {
            Self::BpfToolchain => Row::required(bpf_toolchain::BpfToolchain),
            Self::Bpffs => Row::required(bpffs::Bpffs),
            Self::RedisServer => Row::required(Program { name: "redis-server", package: "redis-server" }),
            Self::Ip => Row::required(Program { name: "ip", package: "iproute2" }),
            Self::Curl => Row::required(Program { name: "curl", package: "curl" }),
            Self::XdpFilter => Row::for_benches(Program { name: "xdp-filter", package: "xdp-tools" }),
            Self::Nft => Row::for_benches(Program { name: "nft", package: "nftables" }),
            Self::Iptables => Row::for_benches(Program { name: "iptables", package: "iptables" }),
            Self::Wrk => Row::for_benches(Program { name: "wrk", package: "wrk" }),
            Self::Qemu => Row {
                item: Box::new(Program { name: "qemu-system-x86_64", package: "qemu-system-x86" }),
                need: Need::OnDemand { by: "cargo xtask vm-test" },
            },
            Self::Nginx => Row::for_benches(Program { name: "nginx", package: "nginx-light" }),
            Self::Ethtool => Row::for_benches(Program { name: "ethtool", package: "ethtool" }),
            // `cargo test` runs the same tests.
            Self::Nextest => Row {
                item: Box::new(CargoTool { name: "cargo-nextest", version: "0.9.143" }),
                need: Need::Optional { without: "tests run with `cargo test`, which ends no test that hangs" },
            },
            Self::Fuzz => Row {
                item: Box::new(CargoTool { name: "cargo-fuzz", version: "0.13.2" }),
                need: Need::OnDemand { by: "cargo xtask fuzz" },
            },
            // Takes minutes to build, so only `ci`, the one command that uses it, installs it.
            Self::Deny => Row {
                item: Box::new(CargoTool { name: "cargo-deny", version: "0.20.2" }),
                need: Need::OnDemand { by: "cargo xtask ci" },
            },
        }
    }
}

/// One row of the table.
trait Item {
    fn name(&self) -> String;
    /// What is there, in words; or what is missing.
    fn check(&self) -> Result<String>;
    fn install(&self, apt: &mut Apt) -> Result<()>;
    /// The commands a person types instead, one a line.
    fn remedy(&self) -> Vec<String>;
}

struct Row {
    item: Box<dyn Item>,
    need: Need,
}

impl Row {
    fn required(item: impl Item + 'static) -> Self {
        Self { item: Box::new(item), need: Need::Required }
    }

    fn for_benches(item: impl Item + 'static) -> Self {
        Self { item: Box::new(item), need: Need::OnDemand { by: "cargo xtask bench" } }
    }
}

#[derive(Clone, Copy)]
enum Need {
    Required,
    /// Takes minutes to build and can be done without: only `setup` installs it.
    Optional {
        without: &'static str,
    },
    OnDemand {
        by: &'static str,
    },
}

/// `cargo xtask setup`.
pub(crate) fn run() -> Result<()> {
    meet(&Requirement::ALL, Audience::Setup)
}

/// For commands that need these; installs what is missing, and prints nothing when nothing is.
pub(crate) fn ensure(requirements: &[Requirement]) -> Result<()> {
    meet(requirements, Audience::OtherCommand)
}

pub(crate) fn is_met(requirement: Requirement) -> bool {
    requirement.row().item.check().is_ok()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Audience {
    Setup,
    OtherCommand,
}

fn meet(requirements: &[Requirement], audience: Audience) -> Result<()> {
    let rows: Vec<Row> = requirements.iter().map(|requirement| requirement.row()).collect();
    meet_rows(&rows, audience)
}

fn meet_rows(rows: &[Row], audience: Audience) -> Result<()> {
    let mut apt = Apt::default();
    let mut missing = Vec::new();
    for row in rows {
        let name = row.item.name();
        let absence = match row.item.check() {
            Ok(found) => {
                if audience == Audience::Setup {
                    println!("{name}: {found}");
                }
                continue;
            }
            Err(absence) => absence,
        };
        match (row.need, audience) {
            (Need::OnDemand { by }, Audience::Setup) => {
                println!("{name}: not there; `{by}` installs it");
                continue;
            }
            (Need::Optional { without }, Audience::OtherCommand) => {
                println!("{name}: not there, so {without}; `cargo xtask setup` installs it");
                continue;
            }
            (Need::Required, _)
            | (Need::Optional { .. }, Audience::Setup)
            | (Need::OnDemand { .. }, Audience::OtherCommand) => {}
        }
        println!("{name}: {absence:#}; installing");
        let failure = match row.item.install(&mut apt).and_then(|()| row.item.check()) {
            Ok(found) => {
                println!("{name}: done, {found}");
                continue;
            }
            Err(failure) => failure,
        };
        if let Need::Optional { without } = row.need {
            println!("{name}: not installed ({failure:#}), so {without}");
            continue;
        }
        println!("{name}: MISSING ({failure:#})");
        missing.push((name, row.item.remedy()));
    }
    if missing.is_empty() {
        return Ok(());
    }
    for (name, commands) in &missing {
        println!("\nto install {name}, type:");
        for command in commands {
            println!("    {command}");
        }
    }
    let names: Vec<&str> = missing.iter().map(|(name, _)| name.as_str()).collect();
    bail!("setup: could not install {}; the commands are above", names.join(", "));
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, rc::Rc};

    use super::*;

    struct Fake {
        there: Rc<Cell<bool>>,
        installs: Rc<Cell<u32>>,
        installable: bool,
    }

    impl Item for Fake {
        fn name(&self) -> String {
            "fake".into()
        }

        fn check(&self) -> Result<String> {
            if self.there.get() { Ok("fake 1.0".into()) } else { bail!("not there") }
        }

        fn install(&self, _: &mut Apt) -> Result<()> {
            self.installs.set(self.installs.get() + 1);
            self.there.set(self.installable);
            Ok(())
        }

        fn remedy(&self) -> Vec<String> {
            vec!["make fake".into()]
        }
    }

    fn fake(installable: bool, need: Need) -> (Row, Rc<Cell<u32>>) {
        let installs = Rc::new(Cell::new(0));
        let item = Fake { there: Rc::default(), installs: Rc::clone(&installs), installable };
        (Row { item: Box::new(item), need }, installs)
    }

    #[test]
    fn installs_what_is_missing_once() {
        let (row, installs) = fake(true, Need::Required);
        let rows = [row];
        meet_rows(&rows, Audience::OtherCommand).expect("it can be installed");
        meet_rows(&rows, Audience::OtherCommand).expect("it is there");
        assert_eq!(installs.get(), 1);
    }

    #[test]
    fn believes_the_check_and_not_the_installation() {
        let (row, _) = fake(false, Need::Required);
        let error = meet_rows(&[row], Audience::Setup).expect_err("it is still missing");
        assert!(error.to_string().contains("fake"), "{error}");
    }

    #[test]
    fn goes_on_without_what_is_optional() {
        let (row, installs) = fake(false, Need::Optional { without: "nothing is lost" });
        let rows = [row];
        meet_rows(&rows, Audience::OtherCommand).expect("it is optional");
        assert_eq!(installs.get(), 0);
        meet_rows(&rows, Audience::Setup).expect("it is optional");
        assert_eq!(installs.get(), 1);
    }

    #[test]
    fn leaves_what_one_command_needs_to_that_command() {
        let (row, installs) = fake(true, Need::OnDemand { by: "cargo xtask ci" });
        let rows = [row];
        meet_rows(&rows, Audience::Setup).expect("setup does not need it");
        assert_eq!(installs.get(), 0);
        meet_rows(&rows, Audience::OtherCommand).expect("it can be installed");
        assert_eq!(installs.get(), 1);
    }
}
