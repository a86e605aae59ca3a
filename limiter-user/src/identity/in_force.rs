//! The keys in force, for those who look at them beside the path of requests.

use std::sync::Arc;

use arc_swap::ArcSwap;

use super::key_file::KeyStore;

/// Shared by whoever puts keys in force and whoever tells of them.
#[derive(Clone, Debug, Default)]
pub struct KeysInForce(Arc<ArcSwap<KeyStore>>);

impl KeysInForce {
    pub fn new(keys: KeyStore) -> Self {
        Self(Arc::new(ArcSwap::from_pointee(keys)))
    }

    pub fn replace(&self, keys: KeyStore) {
        self.0.store(Arc::new(keys));
    }

    pub fn get(&self) -> Arc<KeyStore> {
        self.0.load_full()
    }
}
