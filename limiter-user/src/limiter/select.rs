//! Who asks, and which counter of a rule that makes it.

use std::sync::Arc;

use limiter_common::{addr::SrcPrefixes, rule::EnforcementMode};

use crate::{
    identity::ClientAddress,
    policy::{Limit, Rule, Scope},
    store::{ApiKeyId, Cell, Charge, CounterKey, Identity, SessionId},
};

/// Who a request comes from, as far as it is known.
#[derive(Clone, Debug)]
pub enum Caller {
    /// A known API key.
    Key {
        id: ApiKeyId,
        client: Arc<str>,
        plan: Option<Arc<str>>,
    },
    /// A client that the gateway has authenticated itself, or a verified token names.
    User {
        user: Arc<str>,
        plan: Option<Arc<str>>,
    },
    /// Whoever has this cookie, or this address with this User-Agent.
    Session(SessionId),
    Anonymous,
    /// An API key that is unknown or disabled, or a token that is not valid.
    Unauthenticated,
}

#[derive(Clone, Debug)]
pub struct Subject {
    pub caller: Caller,
    /// `None` when the gateway named no address.
    pub address: Option<ClientAddress>,
}

/// One request as the engine sees it.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    pub subject: &'a Subject,
    pub method: &'a str,
    pub path: &'a str,
    /// What else the request may be, by headers of which one may be the client's own: rules for these apply as well.
    pub also: &'a [(&'a str, &'a str)],
    /// At least 1.
    pub cost: u64,
    pub charge: Charge,
}

impl Subject {
    pub fn is_unauthenticated(&self) -> bool {
        matches!(self.caller, Caller::Unauthenticated)
    }

    pub(super) fn plan(&self, plans: &[Arc<str>]) -> Option<usize> {
        let (Caller::Key { plan: Some(plan), .. } | Caller::User { plan: Some(plan), .. }) = &self.caller else {
            return None;
        };
        plans.iter().position(|known| known == plan)
    }

    fn identity(&self, scope: Scope, prefixes: SrcPrefixes) -> Option<Identity> {
        match (scope, &self.caller) {
            (Scope::Ip, _) => self.address.map(|client| Identity::Ip(prefixes.cut(client.address))),
            // A flood of unknown keys counts against its addresses alone, never against what others share.
            (_, Caller::Unauthenticated) => None,
            (Scope::Global, _) => Some(Identity::Global),
            (Scope::User, Caller::Key { client: user, .. } | Caller::User { user, .. }) => {
                Some(Identity::User(Arc::clone(user)))
            }
            (Scope::Key, Caller::Key { id, .. }) => Some(Identity::Key(*id)),
            (Scope::Session, Caller::Session(id)) => Some(Identity::Session(*id)),
            (Scope::User | Scope::Key | Scope::Session, _) => None,
        }
    }
}

/// The counter of `rule` for this request; `None` when the rule does not apply to its caller or sets no limit.
pub(super) fn cell(rule: &Rule, request: &Request<'_>, plan: Option<usize>, prefixes: SrcPrefixes) -> Option<Cell> {
    let Limit::Limited(algorithm) = rule.limit_for(plan) else { return None };
    let identity = request.subject.identity(rule.scope, prefixes)?;
    Some(Cell {
        key: CounterKey { identity, rule: Arc::clone(&rule.id) },
        algorithm,
        cost: request.cost.saturating_mul(rule.cost),
        enforced: rule.mode == EnforcementMode::Enforce,
    })
}
