//! Who sends a request: an API key that the key store knows, or an address.

pub mod api_key;
pub mod client_address;
mod entries;
mod forwarded;
pub mod jwt;
mod key_copy;
pub mod key_file;
pub mod key_follower;
mod key_record;
pub mod key_redis;
mod known_key;
mod recent;
mod refusal;
pub mod watch;

pub use self::{
    api_key::KeySecret,
    client_address::{AddressHeader, Arrival, ClientAddress, client_address},
    entries::{Entries, KeyOwner},
    jwt::{Jwt, JwtWatch, Verified},
    key_file::KeyStore,
    key_follower::{FollowedKeys, KeyFollower},
    known_key::{Foreseen, KnownKey, KnownKeys},
    refusal::{Refusal, Refusals},
    watch::KeyWatch,
};
