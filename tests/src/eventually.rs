//! Awaiting a condition instead of sleeping for as long as it might take.

use std::{fmt::Debug, time::Duration};

/// Asks every few milliseconds until `condition` holds. Panics with what it last said.
pub async fn eventually<T, E: Debug>(deadline: Duration, mut condition: impl AsyncFnMut() -> Result<T, E>) -> T {
    let mut last = None;
    let asked = async {
        loop {
            match condition().await {
                Ok(value) => return value,
                Err(error) => last = Some(error),
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    match tokio::time::timeout(deadline, asked).await {
        Ok(value) => value,
        Err(_elapsed) => panic!("not within {deadline:?}: {last:?}"),
    }
}
