//! Answers that are held until their turn in a leaky bucket.
//!
//! Each counter has one queue, in which only the first waits for a time; whoever leaves it tells the next. So a held answer
//! costs a place in the queue and no thread, and one whose client goes away costs nothing to skip. Those behind it move up:
//! the counter gets the place back at once, so that the next request to come waits as much less as they do.

use std::{
    collections::{HashMap, VecDeque},
    future::poll_fn,
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use parking_lot::{Mutex, MutexGuard};
use tokio::{sync::oneshot, time::Instant};

use crate::{
    clock::Clock,
    store::{Cell, Charge, CounterKey, memory::MemoryStore},
};

/// Turns of all counters.
pub(super) struct Turns {
    queues: Mutex<Queues>,
    counters: Arc<MemoryStore>,
    clock: Arc<dyn Clock>,
}

impl std::fmt::Debug for Turns {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Turns").field("held", &self.held()).finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
pub(super) struct Queues {
    by_counter: HashMap<CounterKey, Queue>,
    /// Number of the next answer to be held.
    next: u64,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<Waiting>,
    /// Places that became free ahead of the first: number of the first answer that came after, and so counted without it,
    /// and the time that it would have taken.
    freed: Vec<(u64, Duration)>,
}

#[derive(Debug)]
struct Waiting {
    number: u64,
    turn: Instant,
    /// The time that the turn takes.
    takes: Duration,
    /// Told when everybody before has left, and when its turn is.
    first: Option<oneshot::Sender<Instant>>,
    /// Number of the next answer at the time when this one's client went away.
    gone_at: Option<u64>,
}

/// A place in a queue. Whoever drops it without having waited gives it back.
pub struct Turn {
    turns: Arc<Turns>,
    cell: Cell,
    number: u64,
    first: oneshot::Receiver<Instant>,
    taken: bool,
}

impl std::fmt::Debug for Turn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Turn").field("number", &self.number).finish_non_exhaustive()
    }
}

impl Turns {
    pub(super) fn new(counters: Arc<MemoryStore>, clock: Arc<dyn Clock>) -> Arc<Self> {
        Arc::new(Self { queues: Mutex::default(), counters, clock })
    }

    /// To be held from before a request is decided until its answer has joined the queue: turns are in the order in which
    /// requests were decided, and a place that is given back meanwhile would be counted twice.
    pub(super) fn lock(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock()
    }

    /// Answers that are held.
    pub(super) fn held(&self) -> usize {
        let queues = self.queues.lock();
        queues.by_counter.values().flat_map(|queue| &queue.waiting).filter(|waiting| waiting.gone_at.is_none()).count()
    }
}

impl Queues {
    /// Holds the answer to a request that `cell` was charged for, until `turn`.
    pub(super) fn join(&mut self, turns: &Arc<Turns>, cell: Cell, turn: Instant) -> Turn {
        let number = self.next;
        self.next += 1;
        let (first, told) = oneshot::channel();
        let queue = self.by_counter.entry(cell.key.clone()).or_default();
        let takes = cell.algorithm.bucket().map_or(0, |bucket| bucket.increment_ns(cell.cost));
        let takes = Duration::from_nanos(takes);
        queue.waiting.push_back(Waiting { number, turn, takes, first: Some(first), gone_at: None });
        if queue.waiting.len() == 1 {
            queue.tell_first();
        }
        Turn { turns: Arc::clone(turns), cell, number, first: told, taken: false }
    }
}

impl Queue {
    /// Tells the first who is still there that it is the first. Returns whether there is one.
    fn tell_first(&mut self) -> bool {
        while let Some(waiting) = self.waiting.front_mut() {
            if let Some(next) = waiting.gone_at {
                self.freed.push((next, waiting.takes));
                self.waiting.pop_front();
                continue;
            }
            let number = waiting.number;
            // Who came after a place was freed was given a turn without it, and so is everybody behind.
            self.freed.retain(|(next, _)| *next > number);
            let earlier: Duration = self.freed.iter().map(|(_, takes)| *takes).sum();
            let turn = waiting.turn.checked_sub(earlier).unwrap_or(waiting.turn);
            // When nobody listens, the client has gone and its place is about to be given back.
            if let Some(first) = waiting.first.take()
                && first.send(turn).is_err()
            {
                tracing::trace!(target: "limiter::api", number, "a turn came for a client that has gone");
            }
            return true;
        }
        false
    }

    fn position(&self, number: u64) -> Option<usize> {
        self.waiting.binary_search_by_key(&number, |waiting| waiting.number).ok()
    }
}

impl Turn {
    /// Until the turn has come.
    pub async fn wait(mut self) {
        // The sender lives in the queue until it has sent.
        if let Ok(turn) = (&mut self.first).await {
            tokio::time::sleep_until(turn).await;
        }
        self.taken = true;
    }

    /// Until all turns have come. Each has to be waited for at the same time: the first of a queue keeps those behind.
    pub async fn wait_for_all(turns: Vec<Self>) {
        let mut waits: Vec<Pin<Box<_>>> = turns.into_iter().map(|turn| Box::pin(turn.wait())).collect();
        poll_fn(|context| {
            waits.retain_mut(|wait| wait.as_mut().poll(context).is_pending());
            if waits.is_empty() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
        })
        .await;
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut queues = self.turns.queues.lock();
        let next = queues.next;
        let Some(queue) = queues.by_counter.get_mut(&self.cell.key) else { return };
        let Some(position) = queue.position(self.number) else { return };
        if !self.taken {
            queue.waiting[position].gone_at = Some(next);
            // Only of this counter: in other queues nobody moves up, so there the place passes unused.
            let cells = std::slice::from_ref(&self.cell);
            self.turns.counters.decide(self.turns.clock.now(), Charge::Refund, cells);
        }
        if position == 0 {
            if self.taken {
                queue.waiting.pop_front();
            }
            if !queue.tell_first() {
                queues.by_counter.remove(&self.cell.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use limiter_common::{leaky_bucket::LeakyBucket, sliding_window::Outcome};

    use super::*;
    use crate::{
        clock::ManualClock,
        store::{Algorithm, Identity},
    };

    /// Time stands still: what is looked at is when each is told that its turn is.
    struct Shaped {
        turns: Arc<Turns>,
        cell: Cell,
        start: Instant,
    }

    impl Shaped {
        /// Ten a second.
        fn new(queue: u64) -> Self {
            let clock: Arc<dyn Clock> = Arc::new(ManualClock::at(1 << 40));
            let bucket = LeakyBucket::new(10, 1_000_000, queue, 1 << 40).unwrap();
            let cell = Cell {
                key: CounterKey { identity: Identity::Global, rule: "shape".into() },
                algorithm: Algorithm::LeakyBucket { bucket, window_us: 1_000_000 },
                cost: 1,
                enforced: true,
            };
            let counters = Arc::new(MemoryStore::new(Arc::clone(&clock), 100));
            Self { turns: Turns::new(counters, clock), cell, start: Instant::now() }
        }

        /// `Err` with the outcome when it is denied.
        fn join(&self, cost: u64) -> Result<Turn, Outcome> {
            let cell = Cell { cost, ..self.cell.clone() };
            let mut queues = self.turns.lock();
            let cells = std::slice::from_ref(&cell);
            let answer = self.turns.counters.decide(self.turns.clock.now(), Charge::Commit, cells)[0];
            match answer.outcome {
                Outcome::Allowed => {
                    Ok(queues.join(&self.turns, cell, self.start + Duration::from_micros(answer.delay_us)))
                }
                denied @ (Outcome::Denied { .. } | Outcome::Never) => Err(denied),
            }
        }

        /// Lets the first of a queue leave when it is told to; the time of its turn, in milliseconds from the start. Fails
        /// when it is not the first.
        fn leave(&self, mut turn: Turn) -> u128 {
            let at = turn.first.try_recv().unwrap();
            turn.taken = true;
            at.duration_since(self.start).as_millis()
        }
    }

    #[test]
    fn turns_come_one_after_the_other_in_the_order_of_coming() {
        let shaped = Shaped::new(4);
        let turns: Vec<_> = (0..5).map(|_| shaped.join(1).unwrap()).collect();
        assert_eq!(shaped.join(1).unwrap_err(), Outcome::Denied { retry_after_us: 100_000 });
        assert_eq!(shaped.turns.held(), 5);
        let times: Vec<_> = turns.into_iter().map(|turn| shaped.leave(turn)).collect();
        assert_eq!(times, [0, 100, 200, 300, 400]);
        assert!(shaped.turns.lock().by_counter.is_empty());
    }

    #[test]
    fn nobody_is_told_before_those_ahead_have_left() {
        let shaped = Shaped::new(4);
        let first = shaped.join(1).unwrap();
        let mut second = shaped.join(1).unwrap();
        assert!(second.first.try_recv().is_err());
        assert_eq!((shaped.leave(first), shaped.leave(second)), (0, 100));
    }

    #[test]
    fn a_dear_request_takes_as_long_as_it_costs() {
        let shaped = Shaped::new(9);
        let turns = [1, 3, 2, 1].map(|cost| shaped.join(cost).unwrap());
        assert_eq!(turns.map(|turn| shaped.leave(turn)), [0, 100, 400, 600]);
    }

    #[test]
    fn who_goes_away_frees_the_place_and_those_behind_move_up() {
        let shaped = Shaped::new(5);
        let mut turns: Vec<_> = (0..6).map(|_| shaped.join(1).unwrap()).collect();
        assert!(shaped.join(1).is_err());
        // Those whose turns are at 300 and at 200 ms.
        drop(turns.remove(3));
        drop(turns.remove(2));
        assert_eq!(shaped.turns.held(), 4);
        // Two places are free, at the end of what is left.
        turns.extend([shaped.join(1).unwrap(), shaped.join(1).unwrap()]);
        assert!(shaped.join(1).is_err());
        let times: Vec<_> = turns.into_iter().map(|turn| shaped.leave(turn)).collect();
        assert_eq!(times, [0, 100, 200, 300, 400, 500]);
    }

    #[test]
    fn the_first_may_go_away_too() {
        let shaped = Shaped::new(5);
        let [now, first, second, third] = [(); 4].map(|()| shaped.join(1).unwrap());
        assert_eq!(shaped.leave(now), 0);
        drop(first);
        assert_eq!((shaped.leave(second), shaped.leave(third)), (100, 200));
        assert!(shaped.turns.lock().by_counter.is_empty());
    }

    #[test]
    fn thousands_wait_and_any_of_them_may_go() {
        let shaped = Shaped::new(20_000);
        let mut turns: Vec<_> = (0..10_000).map(|_| shaped.join(1).unwrap()).collect();
        assert_eq!(shaped.turns.held(), 10_000);
        let mut number = 0;
        turns.retain(|_| {
            number += 1;
            number % 2 == 0
        });
        assert_eq!(shaped.turns.held(), 5_000);
        for (place, turn) in turns.into_iter().enumerate() {
            assert_eq!(shaped.leave(turn), place as u128 * 100);
        }
        assert!(shaped.turns.lock().by_counter.is_empty());
    }

    #[tokio::test]
    async fn no_turn_comes_early_and_several_are_waited_for_together() {
        let mut shaped = Shaped::new(9);
        let bucket = LeakyBucket::new(1000, 1_000_000, 9, 1 << 40).unwrap();
        shaped.cell.algorithm = Algorithm::LeakyBucket { bucket, window_us: 1_000_000 };
        let turns: Vec<_> = (0..9).map(|_| shaped.join(1).unwrap()).collect();
        Turn::wait_for_all(turns).await;
        assert!(shaped.start.elapsed() >= Duration::from_millis(8));
        assert!(shaped.turns.lock().by_counter.is_empty());
    }
}
