//! What Redis has counted, asked as any node would ask it.

use std::time::Duration;

use limiter_user::store::{
    Algorithm, At, Cell, Charge, CounterKey, Identity, Store as _, StoreError,
    redis::{RedisConfig, RedisStore},
};

/// Above what any test counts.
const CEILING: u64 = 1 << 40;

/// Units of a user's counter that a rule of sliding windows has in Redis: all of them, also above its limit.
///
/// # Errors
///
/// When Redis does not answer.
pub async fn counted(redis: &RedisConfig, user: &str, rule: &str, window_us: u64) -> Result<u64, StoreError> {
    let mut patient = redis.clone();
    patient.timeout = Duration::from_secs(5);
    let key = CounterKey { identity: Identity::User(user.into()), rule: rule.into() };
    let algorithm = Algorithm::sliding_window(window_us, CEILING);
    let cell = Cell { key, algorithm, cost: 1, enforced: true };
    let store = RedisStore::connect(&patient).expect("an address");
    let seen = store.check(At::StoreClock, Charge::Peek, &[cell]).await?;
    Ok(CEILING - seen[0].remaining)
}
