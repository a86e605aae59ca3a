-- lib/counter.lua: arithmetic and storage of one sliding-window counter. Redis scripts cannot import each other, so the
-- agent puts this text in front of every script that it loads. Value, units and bounds: lua/README.md.

local MAX = 9007199254740991 -- 2^53 - 1: up to here Lua's numbers are exact integers

-- Fields of a counter, which is one flat array. After them, three per node: tag, previous, current.
local WINDOW, INDEX, PREVIOUS, CURRENT, NODES = 1, 2, 3, 4, 5

-- An argument. What is above MAX comes back as MAX + 1, so that it still compares as greater.
local function argument(position)
  return math.min(assert(tonumber(ARGV[position]), 'argument ' .. position), MAX + 1)
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

-- What the counter stands for at now_us.
local function estimate(counter, now_us)
  local window = counter[WINDOW]
  -- A clock that has stepped back before the counter's window counts the previous window in full.
  local elapsed = div(now_us, window) < counter[INDEX] and 0 or math.fmod(now_us, window)
  return (muldiv(counter[PREVIOUS], window - elapsed, window)) + counter[CURRENT]
end

-- Moves the counter forward to the window `index`. A node that has nothing in it any more leaves the value.
local function advance(counter, index)
  local windows = index - counter[INDEX]
  if windows <= 0 then return end
  counter[INDEX] = index
  counter[PREVIOUS] = windows == 1 and counter[CURRENT] or 0
  counter[CURRENT] = 0
  local kept = NODES
  for node = NODES, #counter, 3 do
    local tag, current = counter[node], counter[node + 2]
    counter[node], counter[node + 1], counter[node + 2] = nil, nil, nil
    if windows == 1 and current > 0 then
      counter[kept], counter[kept + 1], counter[kept + 2] = tag, current, 0
      kept = kept + 3
    end
  end
end

-- The same rules as `Counter::move_to` in limiter-user/src/store/counter.rs, which gives the reasons. Returns whether the
-- counts were given another window than time alone gives them; that has to be kept, or it would be done each time anew.
local function move_to(counter, window_us, now_us)
  local from = counter[WINDOW]
  if from ~= window_us then
    advance(counter, div(now_us, from))
    if window_us < from then
      for field = PREVIOUS, #counter do
        local is_tag = field >= NODES and (field - NODES) % 3 == 0
        if not is_tag then
          local share, rest = muldiv(counter[field], window_us, from)
          counter[field] = rest > 0 and share + 1 or share
        end
      end
    end
    counter[WINDOW], counter[INDEX] = window_us, div(now_us, window_us)
  end
  local index = div(now_us, window_us)
  local is_ahead = counter[INDEX] > index + 1
  if is_ahead then counter[INDEX] = index end
  advance(counter, index)
  return is_ahead or from ~= window_us
end

local function is_counter(value)
  if type(value) ~= 'table' or #value < CURRENT or (#value - CURRENT) % 3 ~= 0 then return false end
  for field = 1, #value do
    local number = value[field]
    if type(number) ~= 'number' or number < 0 or number > MAX or number ~= math.floor(number) then return false end
  end
  return value[WINDOW] >= 1
end

-- The counter at `key`, moved to the window of now_us; how it is stored: nil, 'current', or 'stale' when it has to be
-- written even if nothing is charged; whether something else was there, which is removed.
local function load(key, window_us, now_us)
  local stored = redis.pcall('GET', key)
  if type(stored) == 'string' then
    local decoded, counter = pcall(cmsgpack.unpack, stored)
    if decoded and is_counter(counter) then
      return counter, move_to(counter, window_us, now_us) and 'stale' or 'current', false
    end
  elseif not stored then
    return { window_us, div(now_us, window_us), 0, 0 }, nil, false
  elseif not string.find(stored.err, 'WRONGTYPE', 1, true) then
    error(stored.err)
  end
  redis.call('DEL', key)
  return { window_us, div(now_us, window_us), 0, 0 }, nil, true
end

local function ttl_ms(counter)
  return math.max(1, math.ceil(counter[WINDOW] * 2 / 1000))
end

-- Writes the counter with its TTL, in one command.
local function save(key, counter)
  redis.call('SET', key, cmsgpack.pack(counter), 'PX', string.format('%.0f', ttl_ms(counter)))
end

-- For a stored counter that is not written: its TTL may have been lost, or be that of a longer window.
local function repair_ttl(key, counter)
  local left = redis.call('PTTL', key)
  if left < 0 or left > ttl_ms(counter) then
    redis.call('PEXPIRE', key, string.format('%.0f', ttl_ms(counter)))
  end
end
