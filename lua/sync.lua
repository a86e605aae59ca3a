-- sync.lua: take one node's totals of one counter, and say what all nodes together have.
-- KEYS[1] counter, e.g. rl:{user:u_1}:login   (single key: cluster safe)
-- ARGV[1] node tag (u32)  ARGV[2] window_us  ARGV[3] index  ARGV[4] previous  ARGV[5] current
--   what this node itself has admitted in the windows index - 1 and index, in full
-- Returns { now_us, status 0 taken | 1 ahead, replaced 0|1, known, index, previous, current, own_previous, own_current }
-- previous and current are sums over all nodes, own_* this node's part of them, `known` its part of the window
-- ARGV[3] before this call (-1: that window is over), `replaced` whether the key held something that is no counter.
-- Idempotent: a node's record only rises to what it says, and the sums rise by as much. Sent twice, it counts once;
-- what was lost comes with the next call; an empty Redis is filled again by what the nodes still know.
-- Ahead: the index is more than one beyond this server's clock. Nothing is taken; the node has to set its clock.

local tag, window_us, index = argument(1), math.min(argument(2), MAX), argument(3)
local previous, current = math.min(argument(4), MAX), math.min(argument(5), MAX)

local now_us = time_us()
local counter, stored, replaced = load(KEYS[1], window_us, now_us)
local status, known = 0, -1
if index > div(now_us, window_us) + 1 then
  status, previous, current = 1, 0, 0
else
  advance(counter, index)
end

local node = NODES
while counter[node] and counter[node] ~= tag do node = node + 3 end
local own_previous, own_current = counter[node + 1] or 0, counter[node + 2] or 0

local behind = counter[INDEX] - index
if status == 1 or behind >= 2 then
  previous, current = 0, 0
elseif behind == 1 then
  known, previous, current = own_previous, current, 0
else
  known = own_current
end

if previous > own_previous or current > own_current then
  local more_previous, more_current = math.max(0, previous - own_previous), math.max(0, current - own_current)
  own_previous, own_current = own_previous + more_previous, own_current + more_current
  counter[PREVIOUS] = math.min(counter[PREVIOUS] + more_previous, MAX)
  counter[CURRENT] = math.min(counter[CURRENT] + more_current, MAX)
  counter[node], counter[node + 1], counter[node + 2] = tag, own_previous, own_current
  save(KEYS[1], counter)
elseif stored == 'stale' then
  save(KEYS[1], counter)
elseif stored then
  repair_ttl(KEYS[1], counter)
end

return {
  now_us, status, replaced and 1 or 0, known,
  counter[INDEX], counter[PREVIOUS], counter[CURRENT], own_previous, own_current,
}
