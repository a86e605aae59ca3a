-- sync.lua: take one node's totals of some counters, and say what all nodes together have.
-- KEYS[1..n] counters, e.g. rl:{user:u_1}:login   (one key where the server is one of a cluster: cluster safe)
-- ARGV[1] number of the message: of two with one tag, the higher was read later
-- then of each counter, in the order of the keys: tag (u32) of the node's part, kind 1 windows | 2 bucket | 3 log, window_us, and
--   windows: index, previous, current
--     what this node itself has admitted in the windows index - 1 and index, in full
--   bucket: interval_ns, burst, total, acknowledged, tat_us, tat_ns
--     total: what this node has taken, less what it gave back; acknowledged: what it knows that this server has of it;
--     tat: when the bucket is full as this node sees it
--   log: n, then n times number, at_us, cost: admissions of the tag; of two with one number the lower cost is right
-- Returns of each counter { now_us, status 0 taken | 1 ahead, replaced 0|1, known, then its state }
--   windows: index, previous, current, own_previous, own_current   bucket: tat_us, tat_ns, own_total
--   log: tag, number, at_us, cost of every admission that counts, this node's as well
-- previous, current and tat are those of all nodes, own_* this node's part; `known` its part of the window `index` before
-- this call (-1: that window is over, or no window); `replaced` whether the key held something that is no counter.
-- Idempotent: a node's record becomes what it says, and the sums change by as much. Sent twice, it counts once; what was
-- lost comes with the next call; an empty Redis is filled again by what the nodes still know.
-- Ahead: the index is more than one beyond this server's clock. Nothing is taken; the node has to set its clock.

local number, now = argument(1), { us = time_us(), ns = 0 }

local function finish(key, counter, stored, changed)
  if changed or stored == 'stale' then
    save(key, counter, now)
  elseif stored then
    repair_ttl(key, counter, now)
  end
end

-- Of one counter, of which `at` is the first argument.
local function take(key, at)
  local tag, kind = argument(at), argument(at + 1)
  local rule = { kind = kind, window = math.min(argument(at + 2), MAX) }
  if kind == BUCKET then
    rule.interval, rule.burst = argument(at + 3), argument(at + 4)
    rule.fill = rule.interval * rule.burst
  else
    rule.burst = MAX
  end

  local counter, stored, replaced = load(key, rule, now)
  local status, index = 0, argument(at + 3)
  if kind == WINDOWS then
    if index > div(now.us, rule.window) + 1 then status = 1 else advance(counter, index) end
  end

  if kind == LOG then
    local known, changed = {}, false
    for entry = NODES, #counter, 4 do
      if counter[entry] == tag then known[counter[entry + 1]] = entry end
    end
    local new = {}
    for told = at + 4, at + 3 + 3 * argument(at + 3), 3 do
      local name, at_us, cost = argument(told), math.min(argument(told + 1), MAX), math.min(argument(told + 2), MAX)
      local entry = known[name]
      if entry then
        if cost < counter[entry + 3] then counter[entry + 3], changed = cost, true end
      elseif math.min(at_us, now.us) + rule.window > now.us then
        new[#new + 1] = { name, at_us, cost }
      end
    end
    -- Only now: an addition moves what is known by its place.
    for _, entry in ipairs(new) do
      log_add(counter, tag, entry[1], entry[2], entry[3])
      changed = true
    end
    log_bound(counter)
    finish(key, counter, stored, changed)
    local reply = { now.us, 0, replaced and 1 or 0, -1 }
    for field = NODES, #counter do reply[#reply + 1] = counter[field] end
    return reply
  end

  local node, is_known = node_of(counter, tag)
  local is_news = status == 0 and (not is_known or number > counter[node + 1])
  local own_previous, own_current = counter[node + 2] or 0, counter[node + 3] or 0
  local known, changed = -1, false

  if kind == WINDOWS then
    local previous, current = math.min(argument(at + 4), MAX), math.min(argument(at + 5), MAX)
    local behind = counter[INDEX] - index
    if behind == 0 then known = own_current elseif behind == 1 then known = own_previous end
    -- One window late, what it calls current is the previous one here.
    if behind == 1 then previous, current = current, own_current end
    -- A node that has nothing any more is kept as well: an earlier message of it may be late.
    if is_news and behind <= 1 then
      add_difference(counter, previous - own_previous, current - own_current)
      own_previous, own_current, changed = previous, current, true
    end
  elseif is_news then
    local total, acknowledged = math.min(argument(at + 5), MAX), math.min(argument(at + 6), MAX)
    -- As much as this server lets a bucket with this node's part lack.
    local most = math.min(rule.fill + ((#counter - CURRENT) / 4 + 1) * (rule.fill + LATE_NS), MAX - 1000)
    local seen = ahead({ nil, nil, argument(at + 7), argument(at + 8) }, now, most)
    local lacked = ahead(counter, now, MAX)
    local lacks
    local more = total - (is_known and own_current or acknowledged)
    if more > 0 then
      -- All of it was allowed by a bucket that lacked no more than it can hold. What the node sees of it has not come back; of
      -- the rest nobody knows whether it has, or whether others took that as well: it counts from when the bucket became full,
      -- by what was told before. The sum may be more than the bucket holds: that is owed.
      local taken = math.min(more * rule.interval, math.min(seen, rule.fill) + LATE_NS)
      local full_for = lacked > 0 and 0 or stored and math.min((now.us - counter[TAT_US]) * 1000, LATE_NS) or LATE_NS
      lacks = math.max(lacked - full_for + taken, math.min(taken, seen))
    else
      lacks = math.max(0, lacked + more * rule.interval)
    end
    -- What this server has forgotten, the node still sees; it saw the others' part as well, so it is not added.
    if not is_known and acknowledged > 0 then lacks = math.max(lacks, seen) end
    -- Where nothing was taken, a bucket that is full keeps the instant since when.
    if more > 0 or lacked > 0 or lacks > 0 then set_ahead(counter, now, math.min(lacks, most), rule.fill) end
    own_previous, own_current, changed = 0, total, true
  end

  if changed then keep_node(counter, node, is_known, tag, number, own_previous, own_current) end
  finish(key, counter, stored, changed)

  local reply = { now.us, status, replaced and 1 or 0, known }
  if kind == BUCKET then
    reply[5], reply[6], reply[7] = counter[TAT_US], math.fmod(counter[TAT_NS], 1000), own_current
  else
    reply[5], reply[6], reply[7] = counter[INDEX], counter[PREVIOUS], counter[CURRENT]
    reply[8], reply[9] = own_previous, own_current
  end
  return reply
end

-- How many arguments there are of the counter whose first is this one.
local function size_of(at)
  local kind = argument(at + 1)
  return kind == WINDOWS and 6 or kind == BUCKET and 9 or 4 + 3 * argument(at + 3)
end

local replies, at = {}, 2
for place, key in ipairs(KEYS) do
  replies[place] = take(key, at)
  at = at + size_of(at)
end
return replies
