//! Which tables and fields a policy file has, before any of them means anything.

use crate::config::raw_table;

raw_table!(RawPolicy { allow, deny, endpoints, plans, overrides, responses, rules, bypass, packet_rules });

raw_table!(RawBypass in place { cidr, key_id, path });

raw_table!(RawEndpoint in place { name, r#match, on_store_failure });

raw_table!(RawPlan { description, inherits });

raw_table!(RawOverride in place { client, rule, limit });

raw_table!(RawRule in place {
    id, scope, endpoint, r#match, limit, plans, window, algorithm, burst_factor, burst, max_delay, cost, precision, mode,
    response, adaptive, on_store_failure;
    later region
});

raw_table!(RawResponse in place { status, content_type, body, headers });

raw_table!(RawAdaptive in place { floor, target, target_latency, decrease, recover });

raw_table!(RawPacketRule in place { id, cidr, packets, bytes, new_connections, mode });

raw_table!(RawPacketLimit in place { rate, burst });
