//! The address that goes over a limit of its own, is dropped in the kernel, knocks all the while, and comes back.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use limiter_user::clock::{Clock as _, SharedClock, Stopwatch};

use super::{
    client::{Answer, Client},
    kernel,
    pace::{Pace, Stop},
    scene,
};
use crate::http::{self, Address};

/// After the block: within its limit.
const LATER_EVERY: Duration = Duration::from_millis(500);
/// How long it waits for an answer while it is blocked; then it knocks again.
const KNOCK: Duration = Duration::from_millis(250);
/// For the block to be written, on a busy machine.
const PUSH_WITHIN: Duration = Duration::from_secs(2);
/// Where in a window the burst begins. A wait ends early in the next window, so it then is long enough to be seen.
const PHASE: Duration = Duration::from_millis(500);

/// Times are since the demonstration began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Story {
    /// When it begins to send.
    pub(super) begins: Duration,
    /// Requests that were allowed before the first was denied.
    pub(super) allowed_before: Option<u64>,
    pub(super) blocked: Option<Block>,
    /// When it was answered 200 again, and how often since.
    pub(super) returned: Option<Duration>,
    pub(super) allowed_after: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Block {
    pub(super) since: Duration,
    /// Between these two is the deadline in the kernel: before and after the agent was asked for it.
    pub(super) not_before: Duration,
    pub(super) not_after: Duration,
}

#[derive(Debug)]
pub(super) struct Impatient<'a> {
    client: Client<'a>,
    admin: Address,
    clock: Stopwatch,
    story: Mutex<Story>,
}

impl<'a> Impatient<'a> {
    pub(super) fn new(client: Client<'a>, admin: Address, clock: Stopwatch) -> Self {
        let story = Story { begins: clock.elapsed() + until_phase(), ..Story::default() };
        Self { client, admin, clock, story: Mutex::new(story) }
    }

    pub(super) fn story(&self) -> Story {
        *self.story.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// In the client's namespace.
    pub(super) fn run(&self, stop: &Stop) {
        if stop.wait(self.story().begins.saturating_sub(self.clock.elapsed())) && self.burst(stop) && self.knock(stop) {
            let mut pace = Pace::every(LATER_EVERY);
            while pace.tick(stop) {
                if self.client.ask(http::TIMEOUT) == Answer::Allowed {
                    self.tell(|story| story.allowed_after += 1);
                }
            }
        }
    }

    /// Sends until it is blocked.
    fn burst(&self, stop: &Stop) -> bool {
        let mut pace = Pace::every(scene::BURST_EVERY);
        let mut allowed = 0;
        while allowed < 3 * scene::ADDRESS_LIMIT && pace.tick(stop) {
            match self.client.ask(http::TIMEOUT) {
                Answer::Allowed => allowed += 1,
                Answer::Denied => {
                    self.tell(|story| story.allowed_before = Some(allowed));
                    return self.find_block(stop);
                }
                Answer::Other | Answer::Silence => {}
            }
        }
        false
    }

    /// Sends until it is answered 200.
    fn knock(&self, stop: &Stop) -> bool {
        while stop.wait(Duration::ZERO) {
            match self.client.ask(KNOCK) {
                Answer::Allowed => {
                    let now = self.clock.elapsed();
                    self.tell(|story| story.returned = Some(now));
                    return true;
                }
                // Over the limit once more.
                Answer::Denied => drop(self.find_block(stop)),
                Answer::Other | Answer::Silence => {}
            }
        }
        false
    }

    /// Waits until the denial has become a block.
    fn find_block(&self, stop: &Stop) -> bool {
        let waiting = Stopwatch::start();
        while waiting.elapsed() < PUSH_WITHIN {
            let asked = self.clock.elapsed();
            if let Ok(Some(remaining)) = kernel::blocked_for(&self.admin, self.client.from) {
                let told = self.clock.elapsed();
                self.tell(|story| {
                    let since = story.blocked.map_or(asked, |block| block.since);
                    let block = Block { since, not_before: asked + remaining, not_after: told + remaining };
                    story.blocked = Some(block);
                });
                return true;
            }
            if !stop.wait(Duration::from_millis(5)) {
                break;
            }
        }
        false
    }

    fn tell(&self, change: impl FnOnce(&mut Story)) {
        change(&mut self.story.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// Time until the next window of the address rule has run for [`PHASE`]. Windows are counted from 1970.
fn until_phase() -> Duration {
    let window = u64::try_from(scene::ADDRESS_WINDOW.as_micros()).unwrap_or(u64::MAX);
    let phase = Duration::from_micros(SharedClock::new().now().get() % window);
    if phase <= PHASE { PHASE - phase } else { scene::ADDRESS_WINDOW + PHASE - phase }
}
