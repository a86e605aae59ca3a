//! What makes two questions the same.

use std::{hash::Hasher, net::IpAddr};

use limiter_common::addr::SrcPrefixes;
use siphasher::sip128::{Hasher128 as _, SipHasher13};

use super::super::{Caller as RequestCaller, Request, select::Matches};
use crate::{active::Active, store};

/// A keyed hash of 128 bits of all that a question has. Nobody outside knows what it is keyed with, so nobody can make a
/// question that has another one's key: the hash stands for the question, which is not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Key {
    pub(super) place: u64,
    pub(super) tag: u64,
}

/// What keys are made with: the operating system's random numbers.
#[derive(Clone)]
pub(in super::super) struct Secret(SipHasher13);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

/// A number that is hard to choose, by which most callers of whom nothing is remembered are told from the others.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Caller(pub(super) u64);

impl Caller {
    #[inline]
    pub(in super::super) fn of(request: &Request<'_>, prefixes: SrcPrefixes) -> Self {
        Self(match &request.subject.caller {
            RequestCaller::Key(owner) => store::IdentityRef::Key(owner.id).hash(),
            RequestCaller::User { user, .. } => user.hash_of_text(),
            RequestCaller::Session(id) => store::IdentityRef::Session(*id).hash(),
            RequestCaller::Anonymous | RequestCaller::Unauthenticated => {
                let address = request.subject.address.map(|client| prefixes.cut(client.address));
                address.map_or(0, |address| store::IdentityRef::Ip(address).hash())
            }
        })
    }
}

impl Secret {
    pub(super) fn random() -> Result<Self, getrandom::Error> {
        Ok(Self(SipHasher13::new_with_keys(getrandom::u64()?, getrandom::u64()?)))
    }
}

impl Key {
    /// `address` is that of the client, cut to its prefix. No two questions say the same: what has no fixed length is
    /// preceded by it.
    pub(in super::super) fn new(
        secret: &Secret,
        active: &Active,
        request: &Request<'_>,
        address: Option<IpAddr>,
        plan: Option<usize>,
        matches: &Matches,
    ) -> Self {
        let mut hasher = secret.0;
        let number = |hasher: &mut SipHasher13, number: usize| hasher.write_u64(number as u64);
        let text = |hasher: &mut SipHasher13, text: &[u8]| {
            hasher.write_u64(text.len() as u64);
            hasher.write(text);
        };
        hasher.write_u64(active.generation);
        hasher.write_u64(active.share_changes.count());
        number(&mut hasher, plan.map_or(0, |plan| plan + 1));
        match &request.subject.caller {
            RequestCaller::Key(owner) => {
                hasher.write_u64(1);
                hasher.write(&owner.id.0);
                text(&mut hasher, owner.client.as_bytes());
            }
            RequestCaller::User { user, .. } => {
                hasher.write_u64(2);
                text(&mut hasher, user.as_bytes());
            }
            RequestCaller::Session(id) => {
                hasher.write_u64(3);
                hasher.write(&id.0);
            }
            RequestCaller::Anonymous => hasher.write_u64(4),
            RequestCaller::Unauthenticated => hasher.write_u64(5),
        }
        match address {
            None => hasher.write_u64(0),
            Some(IpAddr::V4(address)) => hasher.write_u64(1 << 32 | u64::from(address.to_bits())),
            Some(IpAddr::V6(address)) => {
                hasher.write_u64(2 << 32);
                hasher.write(&address.octets());
            }
        }
        number(&mut hasher, request.attributes.len());
        for attribute in request.attributes {
            text(&mut hasher, attribute.as_text().as_bytes());
        }
        number(&mut hasher, matches.readings().len());
        matches.readings().iter().for_each(|readings| hasher.write_u64(*readings));
        for (found, of) in matches.found() {
            number(&mut hasher, found.group);
            hasher.write_u64(u64::from(found.rank) << 32 | u64::from(found.reading));
            number(&mut hasher, *of);
        }
        let hash = hasher.finish128();
        Self { place: hash.h1, tag: hash.h2 }
    }
}
