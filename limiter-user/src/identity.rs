//! Who sends a request: an API key that the key store knows, or an address.

pub mod api_key;
pub mod client_address;
mod forwarded;
pub mod jwt;
pub mod key_file;
pub mod watch;

pub use self::{
    api_key::KeySecret,
    client_address::{AddressHeader, Arrival, ClientAddress, client_address},
    jwt::{Jwt, JwtWatch, Verified},
    key_file::{KeyLookup, KeyOwner, KeyStore},
    watch::KeyWatch,
};
