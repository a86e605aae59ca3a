//! Maps of which only the pin knows the layout: those of another schema. Values are words of eight bytes, which all
//! shared maps have; those of a per-CPU map are the words of one CPU after those of another.

use aya::{
    Pod,
    maps::{Array, HashMap, Map, MapData, MapError, MapType, PerCpuArray, PerCpuValues},
};
use nix::errno::Errno;

use super::error::errno;

/// Bytes of a word.
const WORD: u32 = 8;

/// What is done with an entry: its key, and its words.
pub(super) type Visit<'a> = dyn FnMut(&[u8], &[u64]) -> Result<(), MapError> + 'a;

pub(super) trait RawMap {
    fn each(&self, visit: &mut Visit<'_>) -> Result<(), MapError>;

    fn get(&self, key: &[u8]) -> Result<Option<Vec<u64>>, MapError>;

    fn set(&mut self, key: &[u8], words: &[u64]) -> Result<(), MapError>;
}

/// A map by its own sizes, and the words of its values, of one CPU.
pub(super) struct Opened {
    pub(super) map: Box<dyn RawMap>,
    pub(super) width: usize,
}

/// `None` when a map is of a kind or of sizes that this does not know.
pub(super) fn open(data: MapData) -> Result<Option<Opened>, MapError> {
    let info = data.info()?;
    let (kind, key_size, value_size) = (info.map_type()?, info.key_size(), info.value_size());
    if value_size % WORD != 0 {
        return Ok(None);
    }
    let width = (value_size / WORD) as usize;
    let capacity = info.max_entries();
    let map = Map::from_map_data(data)?;
    let map = match (kind, key_size) {
        (MapType::Hash | MapType::LruHash, 4) => by_width(width, OpenHash::<4> { map, capacity })?,
        (MapType::Hash | MapType::LruHash, 16) => by_width(width, OpenHash::<16> { map, capacity })?,
        (MapType::Array, _) => by_width(width, OpenArray { map })?,
        (MapType::PerCpuArray, _) => by_width(width, OpenPerCpu { map })?,
        _ => None,
    };
    Ok(map.map(|map| Opened { map, width }))
}

/// Opens a map once the size of its values is a constant.
trait Open {
    fn open<const WIDTH: usize>(self) -> Result<Box<dyn RawMap>, MapError>;
}

fn by_width(width: usize, open: impl Open) -> Result<Option<Box<dyn RawMap>>, MapError> {
    match width {
        1 => open.open::<1>(),
        2 => open.open::<2>(),
        3 => open.open::<3>(),
        4 => open.open::<4>(),
        5 => open.open::<5>(),
        6 => open.open::<6>(),
        7 => open.open::<7>(),
        8 => open.open::<8>(),
        9 => open.open::<9>(),
        10 => open.open::<10>(),
        _ => return Ok(None),
    }
    .map(Some)
}

fn key_of<const LEN: usize>(key: &[u8]) -> Result<[u8; LEN], MapError> {
    key.try_into().map_err(|_wrong_len| MapError::InvalidKeySize { size: key.len(), expected: LEN })
}

fn value_of<const WIDTH: usize>(words: &[u64]) -> Result<[u64; WIDTH], MapError> {
    let wrong = |_| MapError::InvalidValueSize { size: size_of_val(words), expected: size_of::<[u64; WIDTH]>() };
    words.try_into().map_err(wrong)
}

fn found<T>(result: Result<T, MapError>) -> Result<Option<T>, MapError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(MapError::KeyNotFound) => Ok(None),
        Err(error) if errno(&error) == Some(Errno::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

struct OpenHash<const KEY: usize> {
    map: Map,
    capacity: u32,
}

struct RawHash<const KEY: usize, const WIDTH: usize> {
    map: HashMap<MapData, [u8; KEY], [u64; WIDTH]>,
    capacity: u32,
}

impl<const KEY: usize> Open for OpenHash<KEY>
where
    [u8; KEY]: Pod,
{
    fn open<const WIDTH: usize>(self) -> Result<Box<dyn RawMap>, MapError> {
        Ok(Box::new(RawHash::<KEY, WIDTH> { map: HashMap::try_from(self.map)?, capacity: self.capacity }))
    }
}

impl<const KEY: usize, const WIDTH: usize> RawMap for RawHash<KEY, WIDTH> {
    fn each(&self, visit: &mut Visit<'_>) -> Result<(), MapError> {
        // A key that is pushed out while it is looked at begins the walk anew, which may not go on for ever.
        for entry in self.map.iter().take(2 * self.capacity as usize) {
            let (key, value) = entry?;
            visit(&key, &value)?;
        }
        Ok(())
    }

    fn get(&self, key: &[u8]) -> Result<Option<Vec<u64>>, MapError> {
        Ok(found(self.map.get(&key_of(key)?, 0))?.map(|value| value.to_vec()))
    }

    fn set(&mut self, key: &[u8], words: &[u64]) -> Result<(), MapError> {
        self.map.insert(key_of(key)?, value_of(words)?, 0)
    }
}

struct OpenArray {
    map: Map,
}

struct RawArray<const WIDTH: usize>(Array<MapData, [u64; WIDTH]>);

impl Open for OpenArray {
    fn open<const WIDTH: usize>(self) -> Result<Box<dyn RawMap>, MapError> {
        Ok(Box::new(RawArray::<WIDTH>(Array::try_from(self.map)?)))
    }
}

impl<const WIDTH: usize> RawMap for RawArray<WIDTH> {
    fn each(&self, visit: &mut Visit<'_>) -> Result<(), MapError> {
        for (index, value) in (0u32..).zip(self.0.iter()) {
            visit(&index.to_ne_bytes(), &value?)?;
        }
        Ok(())
    }

    fn get(&self, key: &[u8]) -> Result<Option<Vec<u64>>, MapError> {
        let index = u32::from_ne_bytes(key_of(key)?);
        if index >= self.0.len() {
            return Ok(None);
        }
        self.0.get(&index, 0).map(|value| Some(value.to_vec()))
    }

    fn set(&mut self, key: &[u8], words: &[u64]) -> Result<(), MapError> {
        self.0.set(u32::from_ne_bytes(key_of(key)?), value_of::<WIDTH>(words)?, 0)
    }
}

struct OpenPerCpu {
    map: Map,
}

struct RawPerCpu<const WIDTH: usize>(PerCpuArray<MapData, [u64; WIDTH]>);

impl Open for OpenPerCpu {
    fn open<const WIDTH: usize>(self) -> Result<Box<dyn RawMap>, MapError> {
        Ok(Box::new(RawPerCpu::<WIDTH>(PerCpuArray::try_from(self.map)?)))
    }
}

impl<const WIDTH: usize> RawMap for RawPerCpu<WIDTH> {
    fn each(&self, visit: &mut Visit<'_>) -> Result<(), MapError> {
        for (index, values) in (0u32..).zip(self.0.iter()) {
            visit(&index.to_ne_bytes(), values?.as_flattened())?;
        }
        Ok(())
    }

    fn get(&self, key: &[u8]) -> Result<Option<Vec<u64>>, MapError> {
        let index = u32::from_ne_bytes(key_of(key)?);
        if index >= self.0.len() {
            return Ok(None);
        }
        self.0.get(&index, 0).map(|values| Some(values.as_flattened().to_vec()))
    }

    fn set(&mut self, key: &[u8], words: &[u64]) -> Result<(), MapError> {
        let cpus: Result<Vec<_>, _> = words.chunks(WIDTH).map(value_of::<WIDTH>).collect();
        let values = PerCpuValues::try_from(cpus?).map_err(MapError::IoError)?;
        self.0.set(u32::from_ne_bytes(key_of(key)?), values, 0)
    }
}
