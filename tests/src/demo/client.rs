//! Clients that send HTTP requests to the gateway.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use limiter_user::clock::Stopwatch;

use super::{
    pace::{Pace, Stop},
    tally::Tally,
};
use crate::http::{self, Address, Connection};

#[derive(Debug)]
pub(super) struct Client<'a> {
    pub(super) from: IpAddr,
    pub(super) gateway: SocketAddr,
    pub(super) api_key: Option<&'a str>,
    pub(super) tally: &'a Tally,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Allowed,
    Denied,
    Other,
    /// Nothing came back in time.
    Silence,
}

impl Client<'_> {
    /// A request on a connection of its own. The calling thread must be in the client's namespace.
    pub(super) fn ask(&self, patience: Duration) -> Answer {
        let asked = Stopwatch::start();
        let key = self.api_key.map(|key| ("X-API-Key", key));
        let address = Address::TcpFrom(self.from, self.gateway);
        let response = Connection::open_within(&address, patience)
            .and_then(|mut connection| connection.request("GET", "/", key.as_slice(), ""));
        let answer = match response.map(|response| response.status) {
            Ok(200) => Answer::Allowed,
            Ok(429) => Answer::Denied,
            Ok(_) => Answer::Other,
            Err(_) => Answer::Silence,
        };
        self.tally.add(|counts| {
            counts.sent += 1;
            match answer {
                Answer::Allowed => {
                    counts.let_in += 1;
                    counts.slowest = counts.slowest.max(asked.elapsed());
                }
                Answer::Denied => counts.denied += 1,
                Answer::Other => counts.other += 1,
                Answer::Silence => {}
            }
        });
        answer
    }
}

/// Sends at a rate of its own, whatever the answers are.
#[derive(Debug)]
pub(super) struct Steady<'a> {
    pub(super) client: Client<'a>,
    pub(super) every: Duration,
}

impl Steady<'_> {
    pub(super) fn run(&self, stop: &Stop) {
        let mut pace = Pace::every(self.every);
        while pace.tick(stop) {
            self.client.ask(http::TIMEOUT);
        }
    }
}
