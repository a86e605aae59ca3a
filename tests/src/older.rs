//! An older schema, for tests of an upgrade: buckets have one field less. A program whose policy limits neither bytes nor
//! connections never touches the last field, and the verifier removes what would, so the object under test runs on it.

use limiter_common::schema::{MAPS, MapKind, MapSpec};
use limiter_user::dataplane::Schema;

use crate::object::xdp_object;

/// Maps of buckets.
const BUCKETS: [&str; 3] = ["BUCKETS_V4", "BUCKETS_V6", "AGGREGATES"];
const FIELD: u32 = 8;

/// The schema of buckets without their last field, under a number.
pub fn schema(version: u32) -> Schema {
    let maps: Vec<MapSpec> = MAPS.iter().copied().map(without_last_field).collect();
    // Few a test, and as long as the test.
    Schema { version, maps: maps.leak() }
}

fn without_last_field(mut spec: MapSpec) -> MapSpec {
    if BUCKETS.contains(&spec.name) {
        spec.value_size -= FIELD;
    }
    spec
}

/// The object under test, with maps of that schema.
///
/// # Panics
///
/// When the object does not have the maps of this build.
pub fn object() -> Vec<u8> {
    let mut object = xdp_object().to_vec();
    for spec in MAPS.iter().filter(|spec| BUCKETS.contains(&spec.name)) {
        // Type, key size, value size and capacity, as the object describes a map.
        let definition = |spec: &MapSpec| {
            let numbers = [kind(spec), spec.key_size, spec.value_size, spec.capacity];
            numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>()
        };
        let (now, older) = (definition(spec), definition(&without_last_field(*spec)));
        let places: Vec<_> = (0..object.len() - now.len()).filter(|at| object[*at..].starts_with(&now)).collect();
        assert_eq!(places.len(), 1, "{} in the object", spec.name);
        object[places[0]..][..older.len()].copy_from_slice(&older);
    }
    object
}

fn kind(spec: &MapSpec) -> u32 {
    const ARRAY: u32 = 2;
    const LRU_HASH: u32 = 9;
    if spec.kind == MapKind::Array { ARRAY } else { LRU_HASH }
}
