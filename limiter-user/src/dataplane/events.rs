//! Reads what the program tells. The ring is pinned and outlives programs and agents, so one reader is enough for all
//! programs of a process, and finds what happened while no agent ran.

use std::{fmt, io};

use aya::maps::{Map, MapData, RingBuf};
use limiter_common::event::Event;
use tokio::io::{Interest, unix::AsyncFd};

use super::{DataplaneError, error::map_error, maps, pins::PinDir};

const MAP: &str = "EVENTS";

/// The ring of events. A second reader would take events from the first.
pub struct EventReader {
    ring: RingBuf<MapData>,
}

impl fmt::Debug for EventReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventReader").finish_non_exhaustive()
    }
}

impl EventReader {
    pub(super) fn open(pins: &PinDir) -> Result<Self, DataplaneError> {
        let map = maps::open_pin(&pins.map(MAP), MAP)?.ok_or(DataplaneError::Object { what: MAP })?;
        let ring = RingBuf::try_from(Map::RingBuf(map)).map_err(map_error("open", MAP))?;
        Ok(Self { ring })
    }

    /// The oldest event that was not read yet.
    pub fn read(&mut self) -> Option<Event> {
        read(&mut self.ring)
    }

    /// For waiting in a runtime.
    #[expect(deprecated, reason = "the ring owns its file descriptor, and has the same one for as long as it lives")]
    pub fn into_async(self) -> io::Result<AsyncEventReader> {
        Ok(AsyncEventReader { ring: AsyncFd::with_interest(self.ring, Interest::READABLE)? })
    }
}

/// An [`EventReader`] that can wait.
pub struct AsyncEventReader {
    ring: AsyncFd<RingBuf<MapData>>,
}

impl fmt::Debug for AsyncEventReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncEventReader").finish_non_exhaustive()
    }
}

impl AsyncEventReader {
    pub fn read(&mut self) -> Option<Event> {
        read(self.ring.get_mut())
    }

    /// Waits until the program has news; samples wake nobody.
    pub async fn news(&mut self) -> io::Result<()> {
        self.ring.readable_mut().await?.clear_ready();
        Ok(())
    }
}

fn read(ring: &mut RingBuf<MapData>) -> Option<Event> {
    loop {
        // Another length would be of another schema, whose pins are refused.
        if let Some(event) = Event::from_bytes(&ring.next()?) {
            return Some(event);
        }
    }
}
