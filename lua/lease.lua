-- lease.lua: take what one node has of one counter of windows, and lend it more.
-- KEYS[1] counter, e.g. rl:{user:u_1}:login   (single key: cluster safe)
-- ARGV[1] tag (u32) of the node's part  ARGV[2] number of the message, as in sync.lua
-- ARGV[3] algorithm 1 sliding_window | 2 fixed_window  ARGV[4] window_us  ARGV[5] ceiling
-- ARGV[6] index  ARGV[7] previous  ARGV[8] current: what the node has used of the window index - 1, and what it has used or
--   still holds of the window `index`, which this server told it; zeros where it has nothing
-- ARGV[9] need: lend so much at least, or nothing  ARGV[10] want: and so much at most  ARGV[11] parts: of what is left, beyond
--   the need, one part of so many at most
-- Returns { now_us, replaced 0|1, granted, index, previous, current, own_current }
--   previous, current: the sums after it; own_current: what the node holds of the window `index`, used or not
-- What is lent is counted at once, in the window of this server's clock, as this node's part. What the node does not have any
-- more of what it had before is given back by that, whether it did not use it or never heard that it had been lent; and
-- what this server has lost is counted again. So messages may be lost and repeated, and nothing is used that was not counted.

local tag, number, algorithm = argument(1), argument(2), argument(3)
local rule = { kind = WINDOWS, window = math.min(argument(4), MAX), burst = MAX }
local ceiling, index = math.min(argument(5), MAX), argument(6)
local need, want, parts = argument(9), argument(10), argument(11)

local now = { us = time_us(), ns = 0 }
local counter, stored, replaced = load(KEYS[1], rule, now)
local node, is_known = node_of(counter, tag)
local own_previous, own_current = counter[node + 2] or 0, counter[node + 3] or 0
local granted, changed = 0, false

if not is_known or number > counter[node + 1] then
  local previous, current = math.min(argument(7), MAX), math.min(argument(8), MAX)
  local behind = counter[INDEX] - index
  -- One window late, what it calls current is the previous one here, and of this one it has nothing.
  if behind == 1 then previous, current = current, 0 end
  if behind < 0 or behind > 1 then previous, current = own_previous, 0 end
  if previous ~= own_previous or current ~= own_current then
    add_difference(counter, previous - own_previous, current - own_current)
    own_previous, own_current, changed = previous, current, true
  end
  local used = algorithm == FIXED_WINDOW and counter[CURRENT] or estimate(counter, now.us)
  local left = ceiling - used
  if left >= need then
    granted = math.max(0, math.min(left, math.max(need, math.min(want, div(math.max(left, 0), parts)))))
  end
  if granted > 0 then
    counter[CURRENT], own_current, changed = counter[CURRENT] + granted, own_current + granted, true
  end
  -- The number is kept, so that an earlier message which is late lends nothing.
  if want == 0 then changed = true end
  if changed then keep_node(counter, node, is_known, tag, number, own_previous, own_current) end
end

if changed or stored == 'stale' then
  save(KEYS[1], counter, now)
elseif stored then
  repair_ttl(KEYS[1], counter, now)
end
return { now.us, replaced and 1 or 0, granted, counter[INDEX], counter[PREVIOUS], counter[CURRENT], own_current }
