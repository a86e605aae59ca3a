//! The Lua scripts: their text and the shape of their calls. Contracts are in the headers of the files.

use limiter_common::{
    bucket::Bucket,
    sliding_window::{Counts, Outcome, Window},
    time::UnixMicros,
};
use redis::{Cmd, Value};

use crate::store::{
    Algorithm, Cell, CellOutcome, Charge,
    algorithm::{View, in_ns},
    counter::{Heard, LoggedAdmission, OwnState, OwnTotals, SharedCounts},
    lease::{Lent, Statement},
    taken_before,
};

/// Up to here Lua's numbers are exact integers: 2^53 − 1.
const MAX: u64 = (1 << 53) - 1;

/// Scripts cannot import each other: the library's text goes in front of each.
const LIBRARY: &str = include_str!("../../../../lua/lib/counter.lua");

/// A script and the hash that Redis calls it by.
#[derive(Debug)]
pub(super) struct Script {
    pub(super) name: &'static str,
    pub(super) text: String,
    sha1: String,
}

impl Script {
    pub(super) fn decide() -> Self {
        Self::new("decide.lua", include_str!("../../../../lua/decide.lua"))
    }

    pub(super) fn sync() -> Self {
        Self::new("sync.lua", include_str!("../../../../lua/sync.lua"))
    }

    pub(super) fn heartbeat() -> Self {
        Self::alone("heartbeat.lua", include_str!("../../../../lua/heartbeat.lua").to_owned())
    }

    pub(super) fn probe() -> Self {
        Self::alone("probe.lua", include_str!("../../../../lua/probe.lua").to_owned())
    }

    pub(super) fn mark() -> Self {
        Self::alone("mark.lua", include_str!("../../../../lua/mark.lua").to_owned())
    }

    pub(super) fn restore() -> Self {
        Self::new("restore.lua", include_str!("../../../../lua/restore.lua"))
    }

    pub(super) fn lease() -> Self {
        Self::new("lease.lua", include_str!("../../../../lua/lease.lua"))
    }

    pub(super) fn keys_read() -> Self {
        Self::alone("keys_read.lua", include_str!("../../../../lua/keys_read.lua").to_owned())
    }

    pub(super) fn keys_merge() -> Self {
        Self::alone("keys_merge.lua", include_str!("../../../../lua/keys_merge.lua").to_owned())
    }

    fn new(name: &'static str, text: &str) -> Self {
        Self::alone(name, format!("{LIBRARY}\n{text}"))
    }

    /// Without the library.
    fn alone(name: &'static str, text: String) -> Self {
        let sha1 = redis::Script::new(&text).get_hash().to_owned();
        Self { name, text, sha1 }
    }

    pub(super) fn call(&self, keys: usize) -> Cmd {
        let mut call = redis::cmd("EVALSHA");
        call.arg(&self.sha1).arg(keys);
        call
    }

    pub(super) fn load(&self) -> Cmd {
        let mut load = redis::cmd("SCRIPT");
        load.arg("LOAD").arg(&self.text);
        load
    }
}

/// Why a reply cannot be what the script returns.
pub(super) type Misfit = String;

/// How the scripts call the algorithms and the kinds of counters.
const WINDOWS: u8 = 1;
const BUCKET: u8 = 2;
const LOG: u8 = 3;

const fn code(algorithm: &Algorithm) -> u8 {
    match algorithm {
        Algorithm::SlidingWindow(_) => 1,
        Algorithm::FixedWindow(_) => 2,
        Algorithm::TokenBucket { .. } => 3,
        Algorithm::LeakyBucket { .. } => 4,
        Algorithm::SlidingLog(_) => 5,
    }
}

/// What a call of `decide.lua` says beside what is decided.
#[derive(Clone, Copy, Debug)]
pub(super) enum Beside<'a> {
    Nothing,
    /// Of a refund: when the costs were charged, by the server's clock. Then nothing else is given back.
    ChargedAt(u64),
    /// Of a charge: what was last heard of each counter, and whether the server has lost some lately.
    Heard {
        views: &'a [Option<View>],
        after_loss: bool,
    },
}

/// A call of `decide.lua`.
///
/// `beside` has one part for each cell, if it is a charge.
pub(super) fn decide(
    script: &Script,
    now_us: u64,
    charge: Charge,
    cells: &[Cell],
    keys: &[Vec<u8>],
    beside: &Beside<'_>,
) -> Cmd {
    let mut call = script.call(keys.len());
    for key in keys {
        call.arg(key.as_slice());
    }
    let charge = match charge {
        Charge::Peek => 0,
        Charge::Commit => 1,
        Charge::Refund => 2,
    };
    call.arg(now_us).arg(0).arg(charge);
    for cell in cells {
        let algorithm = &cell.algorithm;
        let interval_ns = algorithm.bucket().map_or(0, Bucket::interval_ns);
        let max_delay_us = match algorithm {
            Algorithm::LeakyBucket { bucket, .. } => bucket.max_delay_us(),
            Algorithm::SlidingWindow(_)
            | Algorithm::FixedWindow(_)
            | Algorithm::SlidingLog(_)
            | Algorithm::TokenBucket { .. } => 0,
        };
        call.arg(code(algorithm)).arg(algorithm.window_us()).arg(algorithm.ceiling());
        call.arg(interval_ns).arg(max_delay_us).arg(cell.cost).arg(u8::from(cell.enforced));
    }
    match beside {
        Beside::ChargedAt(charged_us) if charge == 2 => {
            call.arg(*charged_us);
        }
        Beside::Heard { views, after_loss } if charge == 1 => {
            call.arg(u8::from(*after_loss));
            for (cell, view) in cells.iter().zip(*views) {
                call.arg(&heard(view.as_ref(), cell.algorithm.window_us()));
            }
        }
        Beside::Nothing | Beside::ChargedAt(_) | Beside::Heard { .. } => {}
    }
    call
}

fn heard(view: Option<&View>, window_us: u64) -> [u64; 3] {
    match view {
        None => [0; 3],
        Some(View::Windows(Counts { index, previous, current })) => [*index, *previous, *current],
        Some(View::Bucket { tat_ns }) => [tat_ns / 1000, tat_ns % 1000, 0],
        Some(View::Log { used, reset_us, .. }) => [*used, reset_us.saturating_sub(window_us), 0],
    }
}

/// What `decide.lua` said.
#[derive(Debug)]
pub(super) struct Decided {
    pub(super) replaced: u64,
    /// Counters that this node knew more of than the server.
    pub(super) restored: u64,
    pub(super) cells: Vec<Judged>,
}

/// What Redis says of one counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Judged {
    pub outcome: CellOutcome,
    /// The state after the decision, and the server's time at which it was made.
    pub view: View,
    pub at: UnixMicros,
}

pub(super) fn decided(reply: Value, charge: Charge, cells: &[Cell]) -> Result<Decided, Misfit> {
    let numbers = integers(reply)?;
    let (head, rest) = numbers.split_at_checked(3).ok_or("too short")?;
    let (now_us, replaced, restored) = (unsigned(head[0])?, unsigned(head[1])?, unsigned(head[2])?);
    if rest.len() != cells.len() * 4 {
        return Err(format!("{} numbers for {} counters", rest.len(), cells.len()));
    }
    let mut outcomes: Vec<CellOutcome> = Vec::with_capacity(cells.len());
    let mut judged = Vec::with_capacity(cells.len());
    for (number, (cell, fields)) in cells.iter().zip(rest.chunks_exact(4)).enumerate() {
        let algorithm = as_lua_takes_it(cell.algorithm);
        let state = [unsigned(fields[1])?, unsigned(fields[2])?, unsigned(fields[3])?];
        // Charged only with the cells before it that allow, which is what it was denied over; when the request passed in spite
        // of it (a shadow cell), those are in the counts already.
        let counted = |view: View| {
            let charged = charge == Charge::Commit && passes_by(rest, cells);
            let taken = if charged { 0 } else { taken_before(cells, &outcomes, number) };
            (view, algorithm.taken(view, now_us, taken))
        };
        // The state after the decision, and the one that the cost was weighed against.
        let (view, weighed) = match algorithm {
            Algorithm::SlidingWindow(_) | Algorithm::FixedWindow(_) => {
                counted(View::Windows(Counts { index: state[0], previous: state[1], current: state[2] }))
            }
            Algorithm::SlidingLog(_) => counted(View::Log { used: state[0], wait_us: state[1], reset_us: state[2] }),
            Algorithm::TokenBucket { .. } | Algorithm::LeakyBucket { .. } => {
                let tat_ns = state[0].checked_mul(1000).and_then(|ns| ns.checked_add(state[1]));
                let view = View::Bucket { tat_ns: tat_ns.ok_or("an instant beyond all times")? };
                (view, View::Bucket { tat_ns: in_ns(now_us).saturating_add(state[2]) })
            }
        };
        let (outcome, delay_us) = match fields[0] {
            1 => (Outcome::Allowed, if charge == Charge::Refund { 0 } else { delay_us(&algorithm, state[2]) }),
            -1 => (Outcome::Never, 0),
            0 => match algorithm.check(weighed, now_us, cell.cost).0 {
                denied @ Outcome::Denied { .. } => (denied, 0),
                other @ (Outcome::Allowed | Outcome::Never) => {
                    return Err(format!("denied what this state makes {other:?}: {weighed:?}"));
                }
            },
            other => return Err(format!("outcome {other}")),
        };
        let (remaining, reset_us) = (algorithm.remaining(view, now_us), algorithm.reset_us(view, now_us));
        let outcome = CellOutcome { outcome, remaining, reset_us, delay_us, over: 0 };
        outcomes.push(outcome);
        judged.push(Judged { outcome, view, at: UnixMicros::new(now_us) });
    }
    Ok(Decided { replaced, restored, cells: judged })
}

/// Windows and ceilings above what Lua can count are taken as that. Buckets are never so large.
fn as_lua_takes_it(algorithm: Algorithm) -> Algorithm {
    let bounded =
        |Window { window_us, ceiling }| Window { window_us: window_us.clamp(1, MAX), ceiling: ceiling.min(MAX) };
    match algorithm {
        Algorithm::SlidingWindow(window) => Algorithm::SlidingWindow(bounded(window)),
        Algorithm::FixedWindow(window) => Algorithm::FixedWindow(bounded(window)),
        Algorithm::SlidingLog(window) => Algorithm::SlidingLog(bounded(window)),
        bucket @ (Algorithm::TokenBucket { .. } | Algorithm::LeakyBucket { .. }) => bucket,
    }
}

/// The time until a turn that comes after what the bucket lacked.
const fn delay_us(algorithm: &Algorithm, lacked_ns: u64) -> u64 {
    match algorithm {
        Algorithm::LeakyBucket { .. } => lacked_ns.div_ceil(1000),
        Algorithm::SlidingWindow(_)
        | Algorithm::FixedWindow(_)
        | Algorithm::SlidingLog(_)
        | Algorithm::TokenBucket { .. } => 0,
    }
}

fn passes_by(fields: &[i64], cells: &[Cell]) -> bool {
    cells.iter().zip(fields.chunks_exact(4)).all(|(cell, fields)| !cell.enforced || fields[0] == 1)
}

/// A call of `sync.lua` for some counters of one server. `number` grows from message to message.
pub(super) fn sync(script: &Script, number: u64, counters: &[(Vec<u8>, &OwnTotals)]) -> Cmd {
    let mut call = script.call(counters.len());
    for (key, _) in counters {
        call.arg(key.as_slice());
    }
    call.arg(number);
    for (_, totals) in counters {
        tell(&mut call, totals);
    }
    call
}

fn tell(call: &mut Cmd, totals: &OwnTotals) {
    call.arg(totals.tag);
    match &totals.state {
        OwnState::Windows { counts: Counts { index, previous, current }, .. } => {
            call.arg(WINDOWS).arg(totals.window_us).arg(index).arg(previous).arg(current);
        }
        OwnState::Bucket { interval_ns, fill_ns, total, acknowledged, tat_ns } => {
            call.arg(BUCKET).arg(totals.window_us).arg(interval_ns).arg(fill_ns / (*interval_ns).max(1));
            call.arg(total).arg(acknowledged).arg(tat_ns / 1000).arg(tat_ns % 1000);
        }
        OwnState::Log { admissions } => {
            call.arg(LOG).arg(totals.window_us).arg(admissions.len());
            for admission in admissions {
                call.arg(admission.number).arg(admission.at_us).arg(admission.cost);
            }
        }
    }
}

/// What a call of `sync.lua` said, by counter.
pub(super) fn by_counter(reply: Value, counters: usize) -> Result<Vec<Value>, Misfit> {
    let Value::Array(replies) = reply else { return Err(format!("{reply:?}")) };
    if replies.len() == counters {
        Ok(replies)
    } else {
        Err(format!("{} replies for {counters} counters", replies.len()))
    }
}

/// What `sync.lua` said of one counter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SyncReply {
    pub now_us: u64,
    /// Whether it is the clock of the server that all go by; set by who knows where the reply came from.
    pub is_of_clock: bool,
    /// The totals' window has not begun by Redis' clock; nothing was taken.
    pub ahead: bool,
    /// The key held something that is no counter.
    pub replaced: bool,
    /// What Redis knew of this node's part of the sent window before; `None` when that window is over, and of buckets and logs.
    pub known: Option<u64>,
    pub shared: SharedCounts,
}

pub(super) fn synced(reply: Value, sent: &OwnState) -> Result<SyncReply, Misfit> {
    let numbers = integers(reply)?;
    let misfit = || format!("{} numbers", numbers.len());
    let (&[now_us, status, replaced, known], state) = numbers.split_first_chunk().ok_or_else(misfit)?;
    let state = state.iter().map(|&number| unsigned(number)).collect::<Result<Vec<u64>, _>>()?;
    let shared = match sent {
        OwnState::Windows { .. } => {
            let &[index, previous, current, own_previous, own_current] = &state[..] else { return Err(misfit()) };
            SharedCounts::Windows { counts: Counts { index, previous, current }, own_previous, own_current }
        }
        OwnState::Bucket { .. } => {
            let &[tat_us, tat_ns, own_total] = &state[..] else { return Err(misfit()) };
            let tat_ns = tat_us.checked_mul(1000).and_then(|ns| ns.checked_add(tat_ns));
            SharedCounts::Bucket { tat_ns: tat_ns.ok_or("an instant beyond all times")?, own_total }
        }
        OwnState::Log { .. } => {
            let (admissions, []) = state.as_chunks::<4>() else { return Err(misfit()) };
            let short = |number: u64| u32::try_from(number).map_err(|error| format!("{number}: {error}"));
            let admission = |&[tag, number, at_us, cost]: &[u64; 4]| {
                Ok::<_, Misfit>(LoggedAdmission { tag: short(tag)?, number: short(number)?, at_us, cost })
            };
            SharedCounts::Log { admissions: admissions.iter().map(admission).collect::<Result<_, _>>()? }
        }
    };
    Ok(SyncReply {
        now_us: unsigned(now_us)?,
        is_of_clock: true,
        ahead: status == 1,
        replaced: replaced == 1,
        known: u64::try_from(known).ok(),
        shared,
    })
}

/// A call of `restore.lua`.
pub(super) fn restore(script: &Script, counter: &Heard, key: &[u8]) -> Cmd {
    let Heard { window_us, view, .. } = counter;
    let (kind, [interval_ns, burst]) = match view {
        View::Windows(_) => (WINDOWS, [0; 2]),
        View::Bucket { .. } => (BUCKET, [counter.interval_ns, counter.fill_ns / counter.interval_ns.max(1)]),
        View::Log { .. } => (LOG, [0; 2]),
    };
    let mut call = script.call(1);
    call.arg(key).arg(kind).arg(window_us).arg(interval_ns).arg(burst).arg(&heard(Some(view), *window_us));
    call
}

/// What `restore.lua` said: whether the key held something that is no counter, and whether this node knew more.
pub(super) fn restored(reply: Value) -> Result<(bool, bool), Misfit> {
    match integers(reply)?[..] {
        [replaced, restored] => Ok((replaced == 1, restored == 1)),
        ref other => Err(format!("{} numbers", other.len())),
    }
}

/// A call of `lease.lua`. `number` grows from message to message.
pub(super) fn lease(script: &Script, number: u64, parts: u64, statement: &Statement, key: &[u8]) -> Cmd {
    let Statement { tag, algorithm, index, previous, current, need, want } = statement;
    let mut call = script.call(1);
    call.arg(key).arg(tag).arg(number).arg(code(algorithm)).arg(algorithm.window_us()).arg(algorithm.ceiling());
    call.arg(index).arg(previous).arg(current).arg(need).arg(want).arg(parts);
    call
}

/// What `lease.lua` said, and whether the key held something that is no counter.
pub(super) fn lent(reply: Value) -> Result<(Lent, bool), Misfit> {
    let numbers = integers(reply)?.into_iter().map(unsigned).collect::<Result<Vec<u64>, _>>()?;
    let &[now_us, replaced, granted, index, previous, current, own_current] = &numbers[..] else {
        return Err(format!("{} numbers", numbers.len()));
    };
    let counts = Counts { index, previous, current };
    Ok((Lent { now_us, granted, counts, own_current }, replaced == 1))
}

fn integers(reply: Value) -> Result<Vec<i64>, Misfit> {
    redis::from_redis_value(reply).map_err(|error| error.to_string())
}

fn unsigned(number: i64) -> Result<u64, Misfit> {
    u64::try_from(number).map_err(|error| format!("{number}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: OwnState =
        OwnState::Windows { counts: Counts { index: 0, previous: 0, current: 0 }, acknowledged_current: 0 };

    /// Every script's header says how many arguments and replies there are; the calls keep to it.
    #[test]
    fn calls_have_the_arity_of_the_headers() {
        let script = Script::sync();
        let totals = |state| {
            let key = crate::store::CounterKey { identity: crate::store::Identity::Global, rule: "r".into() };
            OwnTotals { key, tag: 1, window_us: 1, state }
        };
        let bucket = || OwnState::Bucket { interval_ns: 1, fill_ns: 1, total: 0, acknowledged: 0, tat_ns: 0 };
        let admissions = vec![LoggedAdmission { tag: 1, number: 0, at_us: 1, cost: 1 }];
        // Of two counters, since the second one's come where the first one's end.
        for (state, kind) in [(OWN, "windows"), (bucket(), "bucket"), (OwnState::Log { admissions }, "log")] {
            let line = script.text.lines().find(|line| line.starts_with(&format!("--   {kind}: "))).unwrap();
            let of_state = line.split(" admissions").next().unwrap().matches(',').count() + 1;
            let totals = totals(state);
            let counters = [(b"k".to_vec(), &totals), (b"l".to_vec(), &totals)];
            // The command, the hash, the number of keys and the keys come before.
            let arguments = sync(&script, 1, &counters).args_iter().count() - 5;
            assert_eq!(arguments, 1 + 2 * (3 + of_state), "{line}");
        }
        let reply = script.text.lines().find(|line| line.starts_with("-- Returns")).unwrap();
        assert!(reply.contains("then its state") && reply.matches(',').count() == 4, "{reply}");
        let none = |count| by_counter(Value::Array(vec![Value::Nil; count]), 2);
        assert!(none(2).is_ok() && none(1).is_err() && by_counter(Value::Nil, 0).is_err());
        for (own, numbers) in [(OWN, 9), (bucket(), 7), (OwnState::Log { admissions: Vec::new() }, 12)] {
            assert!(synced(Value::Array(vec![Value::Int(0); numbers]), &own).is_ok(), "{own:?}");
            assert!(synced(Value::Array(vec![Value::Int(0); numbers + 1]), &own).is_err(), "{own:?}");
        }

        let script = Script::lease();
        let algorithm = Algorithm::sliding_window(1, 1);
        let statement = Statement { tag: 1, algorithm, index: 0, previous: 0, current: 0, need: 1, want: 1 };
        let arguments = lease(&script, 1, 8, &statement, b"k").args_iter().count() - 4;
        assert!(arguments == 11 && script.text.contains("ARGV[11]") && !script.text.contains("ARGV[12]"));
        let reply = script.text.lines().find(|line| line.starts_with("-- Returns { now_us, replaced 0|1, g")).unwrap();
        assert_eq!(reply.matches(',').count(), 6, "{reply}");
        assert!(lent(Value::Array(vec![Value::Int(0); 7])).is_ok());
        assert!(lent(Value::Array(vec![Value::Int(0); 6])).is_err());

        let script = Script::restore();
        let view = View::Bucket { tat_ns: 1 };
        let counter = Heard { key: totals(OWN).key, window_us: 1, interval_ns: 1, fill_ns: 1, view };
        let arguments = restore(&script, &counter, b"k").args_iter().count() - 4;
        assert!(arguments == 7 && script.text.contains("ARGV[5..7]"));
        assert_eq!(restored(Value::Array(vec![Value::Int(0), Value::Int(1)])), Ok((false, true)));
        assert!(restored(Value::Array(vec![Value::Int(0)])).is_err());

        let script = Script::decide();
        let cells = [(); 2].map(|()| Cell {
            key: totals(OWN).key,
            algorithm: Algorithm::sliding_window(1, 1),
            cost: 1,
            enforced: true,
        });
        let keys = [(); 2].map(|()| b"k".to_vec());
        let arguments =
            |charge, beside: Beside<'_>| decide(&script, 1, charge, &cells, &keys, &beside).args_iter().count() - 5;
        assert_eq!(arguments(Charge::Commit, Beside::Nothing), 3 + 2 * 7);
        assert!(script.text.contains("ARGV[7i-3..7i+3]"));
        assert_eq!(arguments(Charge::Refund, Beside::ChargedAt(1)), 4 + 2 * 7);
        assert!(script.text.contains("ARGV[7n+4]"));
        let views = [Some(View::Bucket { tat_ns: 1 }), None];
        let known = || Beside::Heard { views: &views, after_loss: true };
        assert_eq!(arguments(Charge::Commit, known()), 4 + 2 * 10);
        assert!(script.text.contains("ARGV[7n+3i+2..7n+3i+4]"));
        assert_eq!(arguments(Charge::Peek, known()), 3 + 2 * 7, "of a charge only");
    }

    #[test]
    fn replies_that_cannot_be_are_errors() {
        assert!(decided(Value::Nil, Charge::Peek, &[]).is_err());
        assert!(decided(Value::Array(vec![Value::Int(1)]), Charge::Peek, &[]).is_err());
        assert!(decided(Value::Array(vec![Value::Int(-1), Value::Int(0), Value::Int(0)]), Charge::Peek, &[]).is_err());
        assert!(synced(Value::Array(vec![Value::Int(-5); 9]), &OWN).is_err());
    }
}
