//! How far above its ceiling a counter may get that nodes share in the background.
//!
//! What one node has admitted since the others heard of it, they do not count. So all together may admit that much on each
//! node beyond the ceiling.

use std::{collections::BTreeMap, sync::Arc};

use crate::store::{
    counter::{OwnState, OwnTotals},
    fleet::Fleet,
};

/// By rule, the most that this node has admitted on one counter between two exchanges.
#[derive(Debug, Default)]
pub(super) struct Bounds {
    by_rule: BTreeMap<Arc<str>, u64>,
    fleet: Fleet,
}

impl Bounds {
    pub(super) fn is_of(&mut self, fleet: &Fleet) {
        self.fleet = fleet.clone();
    }

    /// Sees what was just told.
    pub(super) fn see(&mut self, totals: &OwnTotals) {
        let admitted = match &totals.state {
            OwnState::Windows { counts, acknowledged_current } => counts.current.saturating_sub(*acknowledged_current),
            OwnState::Bucket { total, acknowledged, .. } => total.saturating_sub(*acknowledged),
            OwnState::Log { admissions } => admissions.iter().map(|admission| admission.cost).sum(),
        };
        match self.by_rule.get_mut(&**totals.key.rule.as_arc()) {
            Some(most) => *most = admitted.max(*most),
            None => drop(self.by_rule.insert(Arc::clone(totals.key.rule.as_arc()), admitted)),
        }
    }

    pub(super) fn all(&self) -> Vec<(Arc<str>, u64)> {
        let nodes = self.fleet.reckoned();
        self.by_rule.iter().map(|(rule, most)| (Arc::clone(rule), most.saturating_mul(nodes))).collect()
    }
}
