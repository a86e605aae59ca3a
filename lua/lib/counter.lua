-- lib/counter.lua: arithmetic and storage of one counter. Redis scripts cannot import each other, so the agent puts this
-- text in front of every script that it loads. Value, units and bounds: lua/README.md.

local MAX = 9007199254740991 -- 2^53 - 1: up to here Lua's numbers are exact integers

-- Kinds of counters, and the algorithms of rules.
local WINDOWS, BUCKET, LOG = 1, 2, 3
local SLIDING_WINDOW, FIXED_WINDOW, TOKEN_BUCKET, LEAKY_BUCKET, SLIDING_LOG = 1, 2, 3, 4, 5

-- Fields of a counter, which is one flat array. Of windows, and of buckets: an instant in two numbers, microseconds and
-- nanoseconds (below 1000), since nanoseconds of today are above 2^53; and the time that a unit takes to come back. Above
-- the nanoseconds, in thousands, are the microseconds that the bucket lacks beyond what it can hold: what nodes owe.
-- After them, four per node: tag, number, previous, current (of buckets: 0, total). Of a log the three are 0, and the fours
-- are admissions, oldest first: tag, number, microseconds, cost (less what was given back of it).
local KIND, WINDOW, INDEX, PREVIOUS, CURRENT, NODES = 1, 2, 3, 4, 5, 6
local TAT_US, TAT_NS, INTERVAL = 3, 4, 5
-- Nodes that a value has room for. Beyond, the oldest record goes; what it counted stays in the sums.
local MAX_NODES = 256
-- What a node tells of a bucket was taken within this time, in nanoseconds: the longest interval between two messages.
local LATE_NS = 100000000
-- Admissions that a log has room for: several nodes may each have admitted all that it allows. Beyond, the oldest goes.
local MAX_ADMISSIONS = 20000

-- An argument. What is above MAX comes back as MAX + 1, so that it still compares as greater.
local function argument(position)
  local number = tonumber(ARGV[position])
  -- The text only where it is needed: writing a number takes longer than all else here.
  if not number then error('argument ' .. position) end
  return number > MAX and MAX + 1 or number
end

-- a div b.
local function div(a, b)
  return (a - math.fmod(a, b)) / b
end

-- (a * b) div c and the remainder, for b <= c. The product may be far above 2^53; no step of this is.
local function muldiv(a, b, c)
  local product = a * b
  if product <= MAX then
    return div(product, c), math.fmod(product, c)
  end
  -- Long division, one bit of `a` at a time: rest = (2 * rest + bit * b) mod c.
  local quotient, rest, bit = 0, 0, 1
  while bit * 2 <= a do bit = bit * 2 end
  while bit >= 1 do
    quotient = quotient * 2
    if rest >= c - rest then
      rest, quotient = rest - (c - rest), quotient + 1
    else
      rest = rest + rest
    end
    if a >= bit then
      a = a - bit
      if rest >= c - b then
        rest, quotient = rest - (c - b), quotient + 1
      else
        rest = rest + b
      end
    end
    bit = bit / 2
  end
  return quotient, rest
end

local function time_us()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

-- What a counter of windows stands for at now_us.
local function estimate(counter, now_us)
  local window = counter[WINDOW]
  -- A clock that has stepped back before the counter's window counts the previous window in full.
  local elapsed = div(now_us, window) < counter[INDEX] and 0 or math.fmod(now_us, window)
  return (muldiv(counter[PREVIOUS], window - elapsed, window)) + counter[CURRENT]
end

-- Moves a counter of windows forward to the window `index`. A node that has nothing in it any more leaves the value.
local function advance(counter, index)
  local windows = index - counter[INDEX]
  if windows <= 0 then return end
  counter[INDEX] = index
  counter[PREVIOUS] = windows == 1 and counter[CURRENT] or 0
  counter[CURRENT] = 0
  local kept = NODES
  for node = NODES, #counter, 4 do
    local tag, number, current = counter[node], counter[node + 1], counter[node + 3]
    for field = node, node + 3 do counter[field] = nil end
    if windows == 1 and current > 0 then
      counter[kept], counter[kept + 1], counter[kept + 2], counter[kept + 3] = tag, number, current, 0
      kept = kept + 4
    end
  end
end

-- Where the record of a node is, or would be put, and whether it is there.
local function node_of(counter, tag)
  local node = NODES
  while counter[node] and counter[node] ~= tag do node = node + 4 end
  return node, counter[node] ~= nil
end

-- Writes the record of a node in its place. Where there is no room, the oldest goes.
local function keep_node(counter, node, is_known, tag, number, previous, current)
  if not is_known and (node - NODES) / 4 >= MAX_NODES then
    for _ = 1, 4 do table.remove(counter, NODES) end
    node = node - 4
  end
  counter[node], counter[node + 1], counter[node + 2], counter[node + 3] = tag, number, previous, current
end

-- Adds what a node has more of two windows, or takes what it has less.
local function add_difference(counter, previous, current)
  counter[PREVIOUS] = math.max(0, math.min(counter[PREVIOUS] + previous, MAX))
  counter[CURRENT] = math.max(0, math.min(counter[CURRENT] + current, MAX))
end

-- Nanoseconds that the instant of a bucket is ahead of now, at most `most`.
local function ahead(counter, now, most)
  local us = counter[TAT_US] - now.us
  -- Far apart, the product would not be exact, nor does it have to be.
  if us > most then return most end
  if us < 0 then return 0 end
  return math.max(0, math.min(us * 1000 + math.fmod(counter[TAT_NS], 1000) - now.ns, most))
end

-- What lies beyond `fill`, where that is given, is owed.
local function set_ahead(counter, now, ahead_ns, fill)
  local ns = now.ns + ahead_ns
  counter[TAT_US] = now.us + div(ns, 1000)
  counter[TAT_NS] = math.fmod(ns, 1000) + 1000 * math.ceil(math.max(0, ahead_ns - (fill or ahead_ns)) / 1000)
end

-- What a bucket owed when it was written, in nanoseconds: each node that has a part may have taken all of it once more.
local function owed(counter, fill)
  local nodes = (#counter - CURRENT) / 4
  return math.min(div(counter[TAT_NS], 1000) * 1000, nodes * (fill + LATE_NS), math.max(0, MAX - 1000 - fill))
end

-- Units that a bucket lacks, begun ones counted whole.
local function units(ahead_ns, interval)
  return div(ahead_ns, interval) + (math.fmod(ahead_ns, interval) > 0 and 1 or 0)
end

-- a * b / c, rounded up, for b of any size.
local function scale(a, b, c)
  if b > c then
    -- Whole times first. What is beyond MAX is MAX.
    local times = div(b, c)
    if a > 0 and times > div(MAX, a) then return MAX end
    local share, rest = muldiv(a, math.fmod(b, c), c)
    return math.min(a * times + share + (rest > 0 and 1 or 0), MAX)
  end
  local share, rest = muldiv(a, b, c)
  return rest > 0 and share + 1 or share
end

-- When an admission leaves the window. One from the future, by a clock that stepped back, counts from now on.
local function leaves(counter, entry, now)
  return math.min(counter[entry + 2], now.us) + counter[WINDOW]
end

-- Units that a log has admitted in the window that ends now.
local function logged(counter, now)
  local sum = 0
  for entry = NODES, #counter, 4 do
    if leaves(counter, entry, now) > now.us then sum = sum + counter[entry + 3] end
  end
  return sum
end

-- Time until a log that has `used` units lacks enough of them that no more than `most` are left.
local function log_wait(counter, used, most, now)
  if most >= 0 then
    if used <= most then return 0 end
    for entry = NODES, #counter, 4 do
      local left = leaves(counter, entry, now) - now.us
      if left > 0 then
        used = used - counter[entry + 3]
        if used <= most then return left end
      end
    end
  end
  return counter[WINDOW]
end

-- When the last admission of a log leaves; now when there is none.
local function log_reset(counter, now)
  if #counter < NODES then return now.us end
  return math.max(now.us, math.min(counter[#counter - 1] + counter[WINDOW], MAX))
end

-- Forgets what does not count any more. What lies further ahead than a window was never true, and counts from now.
local function log_advance(counter, now)
  local kept, changed = NODES, false
  local last = #counter
  local is_ahead = last >= NODES and counter[last - 1] > now.us + counter[WINDOW]
  for entry = NODES, last, 4 do
    local at = counter[entry + 2]
    if is_ahead and at > now.us then at, changed = now.us, true end
    if math.min(at, now.us) + counter[WINDOW] > now.us then
      counter[kept], counter[kept + 1], counter[kept + 2], counter[kept + 3] =
        counter[entry], counter[entry + 1], at, counter[entry + 3]
      kept = kept + 4
    end
  end
  for field = last, kept, -1 do counter[field] = nil end
  return changed
end

-- Adds an admission in its place.
local function log_add(counter, tag, number, at, cost)
  local entry = #counter + 1
  while entry > NODES and counter[entry - 2] > at do
    for field = 0, 3 do counter[entry + field] = counter[entry - 4 + field] end
    entry = entry - 4
  end
  counter[entry], counter[entry + 1], counter[entry + 2], counter[entry + 3] = tag, number, at, cost
end

local function log_bound(counter)
  local over = #counter - (NODES - 1) - 4 * MAX_ADMISSIONS
  if over <= 0 then return end
  local last = #counter
  for field = NODES, last do counter[field] = counter[field + over] end
end

local function fresh(rule, now)
  if rule.kind == LOG then return { LOG, rule.window, 0, 0, 0 } end
  if rule.kind == BUCKET then
    return { BUCKET, rule.window, now.us, now.ns, rule.interval }
  end
  return { WINDOWS, rule.window, div(now.us, rule.window), 0, 0 }
end

-- Between windows, a bucket and a log: as many units stay taken as were. Between windows and a bucket the records of nodes
-- stay: their totals mean what they meant to nodes that still have the other algorithm, and other nodes use other tags.
local function convert(counter, rule, now)
  local taken
  if counter[KIND] == WINDOWS then
    advance(counter, div(now.us, counter[WINDOW]))
    taken = estimate(counter, now.us)
  elseif counter[KIND] == BUCKET then
    taken = units(ahead(counter, now, MAX), counter[INTERVAL])
  else
    taken = logged(counter, now)
  end
  if counter[KIND] == LOG or rule.kind == LOG then
    for field = #counter, NODES, -1 do counter[field] = nil end
  end
  counter[KIND], counter[WINDOW] = rule.kind, rule.window
  if rule.kind == BUCKET then
    counter[INTERVAL] = rule.interval
    set_ahead(counter, now, math.min(taken, rule.burst) * rule.interval, rule.fill)
  elseif rule.kind == WINDOWS then
    counter[INDEX], counter[PREVIOUS], counter[CURRENT] = div(now.us, rule.window), 0, taken
  else
    counter[INDEX], counter[PREVIOUS], counter[CURRENT] = 0, 0, 0
    if taken > 0 then log_add(counter, 0, 0, now.us, taken) end
  end
end

-- The same rules as `Counter::move_to` in limiter-user/src/store/counter.rs, which gives the reasons. Returns whether the
-- counter was given more than time alone gives it; that has to be kept, or it would be done each time anew.
local function move_to(counter, rule, now)
  local changed = false
  local from, to = counter[WINDOW], rule.window
  if counter[KIND] ~= rule.kind then
    convert(counter, rule, now)
    changed = true
  elseif rule.kind == BUCKET then
    if from ~= to then
      local lacks, debt = scale(ahead(counter, now, MAX), to, from), scale(div(counter[TAT_NS], 1000) * 1000, to, from)
      lacks = math.min(lacks, MAX - 1000)
      set_ahead(counter, now, lacks, math.max(0, lacks - debt))
      counter[WINDOW] = to
    end
    changed = from ~= to or counter[INTERVAL] ~= rule.interval
    counter[INTERVAL] = rule.interval
  elseif rule.kind == LOG then
    changed = from ~= to
    counter[WINDOW] = to
  elseif from ~= to then
    advance(counter, div(now.us, from))
    if to < from then
      for field = PREVIOUS, #counter do
        -- Of a node's four numbers, the last two are counts.
        if field < NODES or (field - NODES) % 4 >= 2 then counter[field] = scale(counter[field], to, from) end
      end
    end
    counter[WINDOW], counter[INDEX] = to, div(now.us, to)
    changed = true
  end
  if rule.kind == BUCKET then
    local lacks = ahead(counter, now, MAX)
    local most = lacks > rule.fill and rule.fill + owed(counter, rule.fill) or lacks
    if lacks > most then
      set_ahead(counter, now, most, rule.fill)
      return true
    end
    -- Nobody has taken anything that did not come back, for a window: nothing is left to remember of anybody. Sooner, a node
    -- that has given all of it back, and has not heard that this is known, would seem to tell of another bucket.
    if lacks == 0 and now.us - counter[TAT_US] >= counter[WINDOW] then
      for field = #counter, NODES, -1 do counter[field] = nil end
    end
    return changed
  end
  if rule.kind == LOG then return log_advance(counter, now) or changed end
  local index = div(now.us, to)
  if counter[INDEX] > index + 1 then
    counter[INDEX] = index
    changed = true
  end
  advance(counter, index)
  return changed
end

-- Makes a counter what somebody has heard of it, where that is more; returns whether it is. Of windows that is the index and
-- both counts; of a bucket its instant, in microseconds and nanoseconds; of a log the units used and the microseconds of the newest.
local function restore(counter, rule, now, first, second, third)
  if rule.kind == WINDOWS then
    local behind = counter[INDEX] - first
    if behind == 1 then second, third = third, 0 end
    local is_more = second > counter[PREVIOUS] or third > counter[CURRENT]
    if behind < 0 or behind > 1 or not is_more then return false end
    counter[PREVIOUS], counter[CURRENT] = math.max(counter[PREVIOUS], second), math.max(counter[CURRENT], third)
  elseif rule.kind == BUCKET then
    -- What was heard beyond the whole bucket may be a debt, or the work of a clock.
    local heard = ahead({ nil, nil, first, second }, now, rule.fill)
    if heard <= ahead(counter, now, MAX) then return false end
    set_ahead(counter, now, heard, rule.fill)
  else
    local lacks = first - logged(counter, now)
    if lacks <= 0 or second + rule.window <= now.us then return false end
    log_add(counter, 0, 0, math.min(second, now.us), lacks)
  end
  return true
end

local function is_counter(value)
  if type(value) ~= 'table' or #value < CURRENT or (#value - CURRENT) % 4 ~= 0 then return false end
  for field = 1, #value do
    local number = value[field]
    if type(number) ~= 'number' or number < 0 or number > MAX or number ~= math.floor(number) then return false end
  end
  if value[WINDOW] < 1 then return false end
  return value[KIND] == WINDOWS or value[KIND] == LOG or (value[KIND] == BUCKET and value[INTERVAL] >= 1)
end

-- The short form of a counter of windows, which Redis keeps in one small allocation; lua/README.md says what is where. Its
-- first byte begins neither an array in MessagePack nor a text. Of several ways to write these two, the fastest.
local SHORT = 160

local function unit_us(unit)
  return unit == 0 and 1000000 or unit == 1 and 60000000 or unit == 2 and 3600000000 or 86400000000
end

local function unpack_short(text)
  local head = string.byte(text) - SHORT
  local number, pair, radix = 'I3', 'I2', 256
  local node_bytes, start, format = 9, 6, '>I2I3'
  if head % 2 == 1 then number, node_bytes = 'I4', 10 end
  if head % 4 >= 2 then start, format = 7, '>I2I4' end
  local shape = math.fmod(head, 16)
  if shape >= 12 then
    pair, radix, node_bytes = 'I5', 1048576, node_bytes + 3
  elseif shape >= 8 then
    pair, radix, node_bytes = 'I4', 65536, node_bytes + 2
  elseif shape >= 4 then
    pair, radix, node_bytes = 'I3', 4096, node_bytes + 1
  end
  local at, previous, current = 3, 0, 0
  if head >= 16 then
    start, format, at = start + node_bytes - (head % 2 == 1 and 8 or 7), format .. pair, 4
  end
  local nodes = (#text - start) / node_bytes
  if nodes < 0 or nodes > MAX_NODES or nodes % 1 ~= 0 then return nil end
  local read = { struct.unpack(format .. string.rep('I4' .. number .. pair, nodes), text, 2) }
  local unit, both = read[1] % 4, read[3]
  if read[1] < 4 then return nil end
  if at == 4 then
    current = both % radix
    previous = (both - current) / radix
  end
  local counter = { WINDOWS, (read[1] - unit) / 4 * unit_us(unit), read[2], 0, 0 }
  for field = NODES, CURRENT + 4 * nodes, 4 do
    both = read[at + 2]
    local own = both % radix
    counter[field], counter[field + 1], counter[field + 2], counter[field + 3] = read[at], read[at + 1], (both - own) / radix, own
    previous, current, at = previous + counter[field + 2], current + own, at + 3
  end
  counter[PREVIOUS], counter[CURRENT] = previous, current
  return counter
end

-- `nil` where something is beyond what the short form has room for.
local function pack_short(counter)
  local window, index, unit = counter[WINDOW], counter[INDEX], 0
  while unit < 3 and window > 16383 * unit_us(unit) do unit = unit + 1 end
  local units = window / unit_us(unit)
  if units > 16383 or units % 1 ~= 0 or index >= 4294967296 then return nil end
  local last, previous, current = #counter, counter[PREVIOUS], counter[CURRENT]
  local number, count = 0, 0
  for node = NODES, last, 4 do
    local own_previous, own_current = counter[node + 2], counter[node + 3]
    if counter[node + 1] > number then number = counter[node + 1] end
    if own_previous > count then count = own_previous end
    if own_current > count then count = own_current end
    if counter[node] >= 4294967296 then return nil end
    previous, current = previous - own_previous, current - own_current
  end
  if previous < 0 or current < 0 or number >= 4294967296 then return nil end
  if previous > count then count = previous end
  if current > count then count = current end
  local head, format, pair, radix = SHORT, '>BI2I3', 'I2', 256
  if index >= 16777216 then head, format = head + 2, '>BI2I4' end
  if count >= 1048576 then
    return nil
  elseif count >= 65536 then
    head, pair, radix = head + 12, 'I5', 1048576
  elseif count >= 4096 then
    head, pair, radix = head + 8, 'I4', 65536
  elseif count >= 256 then
    head, pair, radix = head + 4, 'I3', 4096
  end
  local node_format, written, at = 'I4I3', { 0, 4 * units + unit, index }, 4
  if number >= 16777216 then head, node_format = head + 1, 'I4I4' end
  if previous > 0 or current > 0 then
    head, format, written[4], at = head + 16, format .. pair, previous * radix + current, 5
  end
  for node = NODES, last, 4 do
    written[at], written[at + 1] = counter[node], counter[node + 1]
    written[at + 2] = counter[node + 2] * radix + counter[node + 3]
    at = at + 3
  end
  written[1] = head
  return struct.pack(format .. string.rep(node_format .. pair, (last - CURRENT) / 4), unpack(written))
end

local function unpack_counter(text)
  local first = string.byte(text)
  if first and first >= SHORT and first < SHORT + 32 then return unpack_short(text) end
  local decoded, counter = pcall(cmsgpack.unpack, text)
  return decoded and is_counter(counter) and counter or nil
end

-- The counter at `key`, moved to now and to its rule; how it is stored: nil, 'current', or 'stale' when it has to be
-- written even if nothing is charged; whether something else was there, which is removed.
local function load(key, rule, now)
  local stored = redis.pcall('GET', key)
  if type(stored) == 'string' then
    local counter = unpack_counter(stored)
    if counter then
      return counter, move_to(counter, rule, now) and 'stale' or 'current', false
    end
  elseif not stored then
    return fresh(rule, now), nil, false
  elseif not string.find(stored.err, 'WRONGTYPE', 1, true) then
    error(stored.err)
  end
  redis.call('DEL', key)
  return fresh(rule, now), nil, true
end

-- Two windows, or as long as a bucket takes to fill.
local function ttl_ms(counter, now)
  local us = counter[WINDOW] * 2
  if counter[KIND] == BUCKET then us = math.max(us, counter[TAT_US] - now.us + 1) end
  return math.max(1, math.ceil(us / 1000))
end

-- Writes the counter with its TTL, in one command.
local function save(key, counter, now)
  local value = counter[KIND] == WINDOWS and pack_short(counter) or cmsgpack.pack(counter)
  redis.call('SET', key, value, 'PX', ttl_ms(counter, now))
end

-- For a stored counter that is not written: its TTL may have been lost, or be that of a longer window.
local function repair_ttl(key, counter, now)
  local left = redis.call('PTTL', key)
  if left < 0 or left > ttl_ms(counter, now) then
    redis.call('PEXPIRE', key, ttl_ms(counter, now))
  end
end
