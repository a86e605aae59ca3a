-- restore.lua: makes a counter what one node has heard of it, where that is more than is left of it.
-- KEYS[1] counter, e.g. rl:{user:u_1}:login   (single key: cluster safe)
-- ARGV[1] kind 1 windows | 2 bucket | 3 log  ARGV[2] window_us  ARGV[3] interval_ns  ARGV[4] burst (0 but of buckets)
-- ARGV[5..7] what it has heard last, as in decide.lua
-- Returns { replaced 0|1, restored 0|1 }: whether the key held something that is no counter, and whether the node knew more
-- For a server that has lost what it had: it cannot be told from one to which somebody has given something back. What is
-- restored is nobody's part.

local kind = argument(1)
local rule = { kind = kind, window = math.min(argument(2), MAX), interval = argument(3), burst = MAX }
if kind == BUCKET then
  rule.burst = argument(4)
  rule.fill = rule.interval * rule.burst
end

local now = { us = time_us(), ns = 0 }
local counter, stored, replaced = load(KEYS[1], rule, now)
local restored = restore(counter, rule, now, argument(5), argument(6), argument(7))
if restored or stored == 'stale' then
  save(KEYS[1], counter, now)
elseif stored then
  repair_ttl(KEYS[1], counter, now)
end
return { replaced and 1 or 0, restored and 1 or 0 }
