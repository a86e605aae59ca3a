//! The Lua scripts: their text and the shape of their calls. Contracts are in the headers of the files.

use limiter_common::sliding_window::{Counts, Outcome, Window};
use redis::{Cmd, Value};

use crate::store::{
    Cell, CellOutcome, Charge,
    counter::{OwnTotals, SharedCounts},
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
    pub(super) fn sliding_window() -> Self {
        Self::new("sliding_window.lua", include_str!("../../../../lua/sliding_window.lua"))
    }

    pub(super) fn sync() -> Self {
        Self::new("sync.lua", include_str!("../../../../lua/sync.lua"))
    }

    fn new(name: &'static str, text: &str) -> Self {
        let text = format!("{LIBRARY}\n{text}");
        let sha1 = redis::Script::new(&text).get_hash().to_owned();
        Self { name, text, sha1 }
    }

    fn call(&self, keys: usize) -> Cmd {
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

/// A call of `sliding_window.lua`.
pub(super) fn decide(script: &Script, now_us: u64, charge: Charge, cells: &[Cell], keys: &[Vec<u8>]) -> Cmd {
    let mut call = script.call(keys.len());
    for key in keys {
        call.arg(key.as_slice());
    }
    call.arg(now_us).arg(u8::from(charge == Charge::Commit));
    for cell in cells {
        call.arg(cell.window.window_us).arg(cell.window.ceiling).arg(cell.cost).arg(u8::from(cell.enforced));
    }
    call
}

/// What `sliding_window.lua` said.
#[derive(Debug)]
pub(super) struct Decided {
    pub(super) replaced: u64,
    pub(super) outcomes: Vec<CellOutcome>,
}

pub(super) fn decided(reply: Value, charge: Charge, cells: &[Cell]) -> Result<Decided, Misfit> {
    let numbers = integers(reply)?;
    let (head, rest) = numbers.split_at_checked(2).ok_or("too short")?;
    let (now_us, replaced) = (unsigned(head[0])?, unsigned(head[1])?);
    if rest.len() != cells.len() * 4 {
        return Err(format!("{} numbers for {} counters", rest.len(), cells.len()));
    }
    let mut outcomes: Vec<CellOutcome> = Vec::with_capacity(cells.len());
    for (number, (cell, fields)) in cells.iter().zip(rest.chunks_exact(4)).enumerate() {
        let window = Window { window_us: cell.window.window_us.clamp(1, MAX), ceiling: cell.window.ceiling.min(MAX) };
        let counts =
            Counts { index: unsigned(fields[1])?, previous: unsigned(fields[2])?, current: unsigned(fields[3])? };
        let outcome = match fields[0] {
            1 => Outcome::Allowed,
            -1 => Outcome::Never,
            0 => {
                // Charged only with the cells before it that allow, which is what it was denied over; when the
                // request passed in spite of it (a shadow cell), those are in the counts already.
                let charged = charge == Charge::Commit && passes_by(rest, cells);
                let taken = if charged { 0 } else { taken_before(cells, &outcomes, number) };
                let tried = Counts { current: counts.current.saturating_add(taken), ..counts };
                match window.check(&tried, now_us, cell.cost) {
                    denied @ Outcome::Denied { .. } => denied,
                    other @ (Outcome::Allowed | Outcome::Never) => {
                        return Err(format!("denied what these counts make {other:?}: {tried:?}"));
                    }
                }
            }
            other => return Err(format!("outcome {other}")),
        };
        let remaining = window.remaining(&counts, now_us);
        outcomes.push(CellOutcome { outcome, remaining, reset_us: window.reset_us(&counts) });
    }
    Ok(Decided { replaced, outcomes })
}

fn passes_by(fields: &[i64], cells: &[Cell]) -> bool {
    cells.iter().zip(fields.chunks_exact(4)).all(|(cell, fields)| !cell.enforced || fields[0] == 1)
}

/// A call of `sync.lua`.
pub(super) fn sync(script: &Script, node_tag: u32, totals: &OwnTotals, key: &[u8]) -> Cmd {
    let mut call = script.call(1);
    let Counts { index, previous, current } = totals.counts;
    call.arg(key).arg(node_tag).arg(totals.window_us).arg(index).arg(previous).arg(current);
    call
}

/// What `sync.lua` said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SyncReply {
    pub now_us: u64,
    /// The totals' window has not begun by Redis' clock; nothing was taken.
    pub ahead: bool,
    /// The key held something that is no counter.
    pub replaced: bool,
    /// What Redis knew of this node's part of the sent window before; `None` when that window is over.
    pub known: Option<u64>,
    pub shared: SharedCounts,
}

pub(super) fn synced(reply: Value) -> Result<SyncReply, Misfit> {
    let numbers = integers(reply)?;
    let &[now_us, status, replaced, known, index, previous, current, own_previous, own_current] = &numbers[..] else {
        return Err(format!("{} numbers", numbers.len()));
    };
    Ok(SyncReply {
        now_us: unsigned(now_us)?,
        ahead: status == 1,
        replaced: replaced == 1,
        known: u64::try_from(known).ok(),
        shared: SharedCounts {
            counts: Counts { index: unsigned(index)?, previous: unsigned(previous)?, current: unsigned(current)? },
            own_previous: unsigned(own_previous)?,
            own_current: unsigned(own_current)?,
        },
    })
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

    /// Every script's header says how many arguments and replies there are; the calls keep to it.
    #[test]
    fn calls_have_the_arity_of_the_headers() {
        let sync = Script::sync();
        let header = |position: usize| format!("ARGV[{position}]");
        assert!(sync.text.contains(&header(5)) && !sync.text.contains(&header(6)));
        let reply = sync.text.lines().find(|line| line.starts_with("-- Returns")).unwrap();
        assert_eq!(reply.matches(',').count() + 1, 9, "{reply}");
        assert!(synced(Value::Array(vec![Value::Int(0); 9])).is_ok());
        assert!(synced(Value::Array(vec![Value::Int(0); 8])).is_err());
    }

    #[test]
    fn replies_that_cannot_be_are_errors() {
        assert!(decided(Value::Nil, Charge::Peek, &[]).is_err());
        assert!(decided(Value::Array(vec![Value::Int(1)]), Charge::Peek, &[]).is_err());
        assert!(decided(Value::Array(vec![Value::Int(-1), Value::Int(0)]), Charge::Peek, &[]).is_err());
        assert!(synced(Value::Array(vec![Value::Int(-5); 9])).is_err());
    }
}
