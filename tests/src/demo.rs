//! The demonstration: four clients send real traffic to a gateway behind a real agent and its XDP program. It shows
//! live what becomes of what they send, and judges at the end whether each was treated as promised.

mod client;
mod flood;
mod frame;
mod impatient;
mod interrupt;
mod kernel;
mod pace;
mod scene;
mod screen;
mod summary;
mod tally;

use std::{env, io, net::SocketAddr, ops::RangeInclusive, sync::Arc, thread, time::Duration};

use anyhow::{Context as _, Result, bail};
use limiter_user::clock::Stopwatch;

use self::{
    client::{Client, Steady},
    flood::Flood,
    frame::Frame,
    impatient::Impatient,
    pace::{Pace, Stop},
    screen::Screen,
    summary::Summary,
    tally::Tally,
};
use crate::{
    agent::{self, Agent, Setup},
    gateway::Gateway,
    netns::TestNet,
};

/// The shortest is what one address needs to be blocked and to come back.
pub const SECONDS: RangeInclusive<u64> = 10..=600;

const TICK: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    AsExpected,
    NotAsExpected,
    Interrupted,
}

/// Runs until `duration` has passed or a signal asks to stop. Removes all that it made, also when it fails.
pub fn run(duration: Duration) -> Result<Ending> {
    require_root()?;
    if env::var_os("LIMITER_BIN").is_none() {
        bail!("LIMITER_BIN is not set; start the demonstration with: cargo xtask run");
    }
    let stop = Arc::new(Stop::default());
    interrupt::watch(Arc::clone(&stop)).context("listening for signals")?;

    let net = scene::namespaces();
    let setup = scene::setup(&net);
    let api_key = setup.add_key("demo", scene::PLAN);
    let mut agent = net.gateway(|| setup.spawn());
    if !wait_until_ready(&mut agent, &stop)? {
        return Ok(Ending::Interrupted);
    }
    let gateway = net
        .gateway(|| Gateway::start(SocketAddr::new(scene::GATEWAY, scene::PORT), setup.http()))
        .context("starting the gateway")?;
    let ending = show(&net, &setup, &gateway, &api_key, duration, &stop);
    if stop.is_interrupted() {
        return Ok(Ending::Interrupted);
    }
    ending.map_err(|error| {
        if agent.is_running() { error } else { error.context(format!("the agent ended; it said:\n{}", setup.log())) }
    })
}

fn require_root() -> Result<()> {
    if nix::unistd::geteuid().is_root() {
        return Ok(());
    }
    bail!(
        "the demonstration needs root, to make network namespaces and to load the XDP program; \
         run: sudo -E env \"PATH=$PATH\" cargo xtask run"
    );
}

/// False when interrupted.
fn wait_until_ready(agent: &mut Agent<'_>, stop: &Stop) -> Result<bool> {
    let waiting = Stopwatch::start();
    while !agent.is_ready() {
        if !stop.wait(Duration::from_millis(10)) {
            return Ok(false);
        }
        if !agent.is_running() {
            bail!("the agent did not start:\n{}", agent.setup().log());
        }
        if waiting.elapsed() > agent::START {
            bail!("the agent is not ready within {:?}:\n{}", agent::START, agent.setup().log());
        }
    }
    Ok(true)
}

/// All the traffic, with its display and its judgement.
fn show(
    net: &TestNet,
    setup: &Setup,
    gateway: &Gateway,
    api_key: &str,
    duration: Duration,
    stop: &Stop,
) -> Result<Ending> {
    let mut screen = Screen::new(io::stdout());
    screen.header(&kernel::mode(&setup.admin())?, duration)?;

    let clock = Stopwatch::start();
    let (good, flooded, keyed, over) = (Tally::default(), Tally::default(), Tally::default(), Tally::default());
    let client = |from, tally, api_key| Client { from, gateway: gateway.address(), api_key, tally };
    let well_behaved = Steady { client: client(scene::GOOD, &good, None), every: scene::GOOD_EVERY };
    let over_plan = Steady { client: client(scene::KEYED, &keyed, Some(api_key)), every: scene::KEYED_EVERY };
    let impatient = Impatient::new(client(scene::IMPATIENT, &over, None), setup.admin(), clock);
    let flood = Flood::open(net, &flooded)?;
    let frame = || -> Result<Frame> {
        Ok(Frame {
            elapsed: clock.elapsed(),
            duration,
            good: good.read(),
            flood: flooded.read(),
            key: keyed.read(),
            impatient: over.read(),
            story: impatient.story(),
            kernel: kernel::read(&setup.admin())?,
        })
    };
    thread::scope(|scope| {
        let _ends_with_the_display = stop.on_drop();
        scope.spawn(|| net.client(|| well_behaved.run(stop)));
        scope.spawn(|| net.client(|| over_plan.run(stop)));
        scope.spawn(|| net.client(|| impatient.run(stop)));
        scope.spawn(|| flood.send(stop));
        scope.spawn(|| flood.receive(stop));
        let mut pace = Pace::every(TICK);
        while clock.elapsed() < duration && pace.tick(stop) {
            screen.show(&frame()?)?;
        }
        Ok::<_, anyhow::Error>(())
    })?;
    if stop.is_interrupted() {
        return Ok(Ending::Interrupted);
    }
    // What was under way when the clients were told to end has its answer by then.
    let last = frame()?;
    let summary = Summary::of(&last);
    screen.summary(&last, &summary)?;
    Ok(if summary.is_as_expected() { Ending::AsExpected } else { Ending::NotAsExpected })
}
