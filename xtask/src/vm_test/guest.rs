//! What is inside of the machine: the tests with their libraries, the XDP object, and an init that runs them.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};

use super::{Binary, Options, debian::Kernel, initramfs::Initramfs};
use crate::{process, workspace::Workspace};

/// Starts the line by which init tells of a binary that has ended.
pub(super) const ENDED: &str = "vm-test: ended ";
/// Pairs of interfaces, and what other programs attach to in the tests.
const MODULES: [&str; 1] = ["drivers/net/veth.ko"];
const OBJECT: &str = "/work/limiter.bpf.o";
/// The place of the package limiter-tests, from which tests find their files.
const TESTS: &str = "/work/tests";

pub(super) struct Guest<'a> {
    pub(super) workspace: &'a Workspace,
    pub(super) kernel: &'a Kernel,
    pub(super) executables: &'a [(&'static Binary, PathBuf)],
    pub(super) options: &'a Options,
}

impl Guest<'_> {
    pub(super) fn archive(&self) -> Result<Vec<u8>> {
        let mut initramfs = Initramfs::default();
        for folder in ["/proc", "/sys", "/dev", "/run", "/tmp", TESTS] {
            initramfs.folder(folder)?;
        }
        initramfs.copy(&self.kernel.busybox, "/bin/busybox")?;
        initramfs.copy(&self.workspace.bpf_object(), OBJECT)?;
        for module in MODULES {
            initramfs.copy(&self.kernel.modules.join(module), &module_path(module))?;
        }
        let corpus = self.workspace.root().join("fuzz/corpus/parse");
        for entry in fs::read_dir(&corpus).with_context(|| format!("list {}", corpus.display()))? {
            let entry = entry?;
            initramfs
                .copy(&entry.path(), &format!("/work/fuzz/corpus/parse/{}", entry.file_name().to_string_lossy()))?;
        }
        let ip = process::find_program("ip").context("ip is not in PATH")?;
        initramfs.copy(&ip, "/bin/ip")?;
        let mut libraries = libraries(&ip)?;
        for (binary, executable) in self.executables {
            initramfs.copy(&self.stripped(binary.name, executable)?, &program_path(binary.name))?;
            libraries.extend(self::libraries(executable)?);
        }
        libraries.sort();
        libraries.dedup();
        for library in libraries {
            initramfs.copy(&library, &library.to_string_lossy())?;
        }
        initramfs.file("/init", self.init()?.as_bytes())?;
        initramfs.finish()
    }

    /// Debug information is nine tenths of a test binary.
    fn stripped(&self, name: &str, executable: &Path) -> Result<PathBuf> {
        let stripped = self.workspace.target().join("vm").join(name);
        let mut strip = Command::new("strip");
        strip.arg("--strip-debug").arg("-o").arg(&stripped).arg(executable);
        process::run(&mut strip, &format!("strip the tests of {name}"))?;
        Ok(stripped)
    }

    fn init(&self) -> Result<String> {
        let mut script = format!(
            "#!/bin/busybox sh\n\
             /bin/busybox --install -s /bin\n\
             export PATH=/bin\n\
             mount -t proc proc /proc\n\
             mount -t sysfs sysfs /sys\n\
             mount -t devtmpfs devtmpfs /dev\n\
             mount -t tmpfs tmpfs /run\n\
             mount -t tmpfs tmpfs /tmp\n\
             mount -t bpf bpf /sys/fs/bpf\n\
             ip link set lo up\n\
             export LIMITER_BPF_OBJECT={OBJECT} CARGO_MANIFEST_DIR={TESTS} LIMITER_TEST_NO_SKIP=1\n\
             export LIMITER_FRAMES={}\n\
             cd {TESTS}\n\
             uname -srv\n",
            self.options.frames
        );
        for module in MODULES {
            writeln!(script, "insmod {}", module_path(module))?;
        }
        for (Binary { name, skip }, _) in self.executables {
            let skip: String = skip.iter().map(|test| format!(" --skip {test}")).collect();
            let filters: String = self.options.filters.iter().map(|filter| format!(" {}", quoted(filter))).collect();
            // Two tests at a time, as many as the machine has CPUs.
            writeln!(script, "{} --nocapture --test-threads 2{skip}{filters}", program_path(name))?;
            writeln!(script, "echo; echo \"{ENDED}{name} $?\"")?;
        }
        script.push_str("poweroff -f\n");
        Ok(script)
    }
}

fn program_path(name: &str) -> String {
    format!("/work/{name}")
}

fn module_path(module: &str) -> String {
    format!("/modules/{module}")
}

fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// The shared libraries of a program, the loader included, at the paths where the loader looks.
fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let says = process::output(Command::new("ldd").arg(program), "find the libraries of a program")?;
    Ok(says.lines().filter_map(library).collect())
}

/// `name => path (address)`, or `path (address)` for the loader.
fn library(line: &str) -> Option<PathBuf> {
    line.split_whitespace().find(|word| word.starts_with('/')).map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_ldd_prints() {
        for (line, path) in [
            ("\tlinux-vdso.so.1 (0x00007fda97c13000)", None),
            ("\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x1)", Some("/lib/x86_64-linux-gnu/libc.so.6")),
            ("\t/lib64/ld-linux-x86-64.so.2 (0x1)", Some("/lib64/ld-linux-x86-64.so.2")),
        ] {
            assert_eq!(library(line), path.map(PathBuf::from), "{line}");
        }
    }
}
