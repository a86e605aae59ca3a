//! The virtual machine: QEMU with a kernel, an initramfs, a serial console, and nothing else.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};

pub(super) const QEMU: &str = "qemu-system-x86_64";
const MEMORY_MIB: &str = "2048";

/// Boots and prints what the machine says, line by line, until it powers off.
pub(super) fn run(kernel: &Path, initramfs: &Path, time: Duration) -> Result<Vec<String>> {
    let mut qemu = Command::new(QEMU);
    if has_virtualization() {
        qemu.args(["-accel", "kvm", "-cpu", "host"]);
    } else {
        println!("this host has no hardware virtualization to use, so the machine is emulated, and slow");
        qemu.args(["-accel", "tcg,thread=multi", "-cpu", "max"]);
    }
    qemu.args(["-smp", "2", "-m", MEMORY_MIB, "-nodefaults", "-nographic", "-no-reboot", "-serial", "stdio"]);
    // A panic reboots, and a reboot ends the machine.
    qemu.args(["-append", "console=ttyS0 quiet panic=-1"]).arg("-kernel").arg(kernel).arg("-initrd").arg(initramfs);
    let child = qemu.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
    Machine(child.with_context(|| format!("start {QEMU}"))?).watch(time)
}

/// The modules of KVM that work without the CPU's help run kernels made for them only.
fn has_virtualization() -> bool {
    let can_open = fs::File::options().read(true).write(true).open("/dev/kvm").is_ok();
    let flags = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let has_flag = flags.lines().filter(|line| line.starts_with("flags")).take(1).flat_map(str::split_whitespace);
    can_open && has_flag.into_iter().any(|flag| flag == "vmx" || flag == "svm")
}

/// Ends with the value.
struct Machine(Child);

impl Machine {
    fn watch(mut self, time: Duration) -> Result<Vec<String>> {
        let console = self.0.stdout.take().context("the console of the machine is not connected")?;
        let (sender, receiver) = mpsc::channel();
        // The console closes when the machine ends.
        thread::spawn(move || {
            let mut lines = Vec::new();
            for line in BufReader::new(console).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line).trim_end().to_owned();
                println!("{line}");
                lines.push(line);
            }
            // Nobody waits any more when the time is over.
            drop(sender.send(lines));
        });
        let Ok(lines) = receiver.recv_timeout(time) else {
            bail!("the machine was ended after {} s; give it more with --seconds", time.as_secs());
        };
        let status = self.0.wait().context("wait for the machine to end")?;
        if !status.success() {
            bail!("{QEMU} ended with {status}");
        }
        Ok(lines)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Both fail when it has ended already.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}
