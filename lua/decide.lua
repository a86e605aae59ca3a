-- decide.lua: decide one request over all of its counters, and charge all of them or none.
-- KEYS[1..n] counters, e.g. rl:{user:u_1}:login   (one request's counters of one identity share a hash tag)
-- ARGV[1] now_us (0: the server's TIME)  ARGV[2] nanoseconds beside it, below 1000
-- ARGV[3] charge 1, or 0 for a peek, or 2 to give the costs back
-- ARGV[7i-3..7i+3], a counter each: algorithm, window_us, most, interval_ns, max_delay_us, cost, enforced 1|0
--   algorithm: 1 sliding_window | 2 fixed_window | 3 token_bucket | 4 leaky_bucket | 5 sliding_log; most: the ceiling of a window, the
--   burst of a bucket; interval_ns (buckets only): the time that a unit takes to come back; max_delay_us: leaky only;
--   enforced 0: shadow, its denial changes nothing
-- ARGV[7n+4], of a refund only, may be absent: when the costs were charged, in microseconds by this server's clock. Then only
--   what was charged at that time is given back, of windows in the window that it was charged in, whatever came after
-- ARGV[7n+4], of a charge only, may be absent with all that follows: 1 if this server has lost counters lately, else 0
-- ARGV[7n+3i+2..7n+3i+4], a counter each: what the agent last heard of it, three numbers (0 where it heard nothing): of windows index,
--   previous, current; of buckets tat_us, tat_ns, 0; of a log units used, microseconds of the newest admission, 0. A counter that
--   is gone here is that much; one that is there is so after a loss only, since somebody may have given back
-- Returns { now_us, replaced, restored, then a counter each: outcome 1 allowed | 0 denied | -1 never, and three numbers of its state }
--   log: units used, microseconds until the cost fits, when the last admission leaves
--   windows: index, previous, current   buckets: tat_us, tat_ns, nanoseconds that it lacked when the cost was weighed
-- The state is that after the decision; `replaced` is how many keys held something that is no counter, `restored` how many
-- counters the agent knew more of.
-- Remaining, reset, retry_after and delay follow from it; the agent computes them, so they are defined once.
-- Integers up to 2^53 - 1; greater ceilings are taken as that, greater costs can never be allowed.

local now = { us = argument(1), ns = argument(2) }
if now.us == 0 then now.us = time_us() end
local charge, refund = argument(3) == 1, argument(3) == 2

local KIND_OF = {
  [SLIDING_WINDOW] = WINDOWS, [FIXED_WINDOW] = WINDOWS, [TOKEN_BUCKET] = BUCKET, [LEAKY_BUCKET] = BUCKET,
  [SLIDING_LOG] = LOG,
}

local counters, stored, replaced = {}, {}, 0
local cells, passes = {}, true

-- What a cell takes of its counter, `taken` more than it says.
local function outcome_of(cell, counter, taken)
  if cell.cost > cell.burst then return -1 end
  if cell.kind == BUCKET then
    cell.lacked = math.min(ahead(counter, now, MAX) + taken * cell.interval, MAX)
    local most = cell.fill - cell.cost * cell.interval
    if cell.algorithm == LEAKY_BUCKET then most = math.min(most, cell.max_delay * 1000) end
    return cell.lacked <= most and 1 or 0
  end
  if cell.kind == LOG then
    local used = logged(counter, now)
    cell.wait = log_wait(counter, used, cell.burst - cell.cost - taken, now)
    return used + taken <= cell.burst - cell.cost and 1 or 0
  end
  local used = cell.algorithm == FIXED_WINDOW and counter[CURRENT] or estimate(counter, now.us)
  return used + taken <= cell.burst - cell.cost and 1 or 0
end

local charged_us = refund and tonumber(ARGV[7 * #KEYS + 4])
-- Nothing where the agent does not say what it heard.
local after_loss = charge and tonumber(ARGV[7 * #KEYS + 4])

local restored, restored_count = {}, 0

local function restore_heard(cell, counter, at)
  return restore(counter, cell, now, argument(at), argument(at + 1), argument(at + 2))
end

local function give_back(cell, counter)
  if cell.kind == BUCKET then
    local lacks = ahead(counter, now, MAX)
    local back = math.min(cell.cost, cell.burst) * cell.interval
    -- A bucket that was full meanwhile has thrown away what came back by itself: that much at most.
    if charged_us then back = math.max(0, back - math.max(0, now.us - charged_us) * 1000) end
    set_ahead(counter, now, lacks - math.min(lacks, back), cell.fill)
  elseif cell.kind == WINDOWS and charged_us then
    local behind = counter[INDEX] - div(charged_us, cell.window)
    local field = behind == 0 and CURRENT or behind == 1 and PREVIOUS
    if field then counter[field] = math.max(0, counter[field] - cell.cost) end
  elseif cell.kind == LOG then
    local left = cell.cost
    for entry = #counter - 3, NODES, -4 do
      -- Those of requests decided here are nobody's part.
      local is_meant = not charged_us or (counter[entry] == 0 and counter[entry + 2] == charged_us)
      local back = is_meant and math.min(left, counter[entry + 3]) or 0
      counter[entry + 3], left = counter[entry + 3] - back, left - back
    end
  else
    local of_current = math.min(cell.cost, counter[CURRENT])
    counter[CURRENT] = counter[CURRENT] - of_current
    counter[PREVIOUS] = math.max(0, counter[PREVIOUS] - (cell.cost - of_current))
  end
end

for i, key in ipairs(KEYS) do
  local at = 7 * i - 3
  local cell = {
    algorithm = argument(at), window = math.min(argument(at + 1), MAX), burst = math.min(argument(at + 2), MAX),
    interval = argument(at + 3), max_delay = argument(at + 4), cost = argument(at + 5),
    enforced = argument(at + 6) == 1, lacked = 0, wait = 0,
  }
  cell.kind = KIND_OF[cell.algorithm]
  cell.fill = cell.interval * cell.burst
  cells[i] = cell
  if not counters[key] then
    local was_replaced
    counters[key], stored[key], was_replaced = load(key, cell, now)
    if was_replaced then replaced = replaced + 1 end
    local is_asked = after_loss == 1 or (after_loss and not stored[key])
    if is_asked and restore_heard(cell, counters[key], 7 * #KEYS + 3 * i + 2) then
      restored[key], restored_count = true, restored_count + 1
    end
  end
  -- A counter that appears twice has to hold the sum. A shadow cell takes nothing from an enforced one.
  local taken = 0
  for j = 1, i - 1 do
    if KEYS[j] == key and cells[j].outcome == 1 and (cells[j].enforced or not cell.enforced) then
      taken = taken + cells[j].cost
    end
  end
  cell.outcome = refund and 1 or outcome_of(cell, counters[key], taken)
  if cell.enforced and cell.outcome ~= 1 then passes = false end
end

local charged = {}
if passes and (charge or refund) then
  for i, key in ipairs(KEYS) do
    local cell, counter = cells[i], counters[key]
    if refund then
      if stored[key] then
        give_back(cell, counter)
        charged[key] = true
      end
    elseif cell.outcome == 1 then
      if cell.kind == BUCKET then
        local lacks = math.min(ahead(counter, now, MAX) + cell.cost * cell.interval, MAX - 1000)
        set_ahead(counter, now, lacks, cell.fill)
      elseif cell.kind == LOG then
        local newest = #counter >= NODES and counter[#counter - 2] or 0
        log_add(counter, 0, math.fmod(newest + 1, 4294967296), now.us, cell.cost)
      else
        counter[CURRENT] = math.min(counter[CURRENT] + cell.cost, MAX)
      end
      charged[key] = true
    end
  end
end

local reply = { now.us, replaced, restored_count }
for i, key in ipairs(KEYS) do
  local cell, counter = cells[i], counters[key]
  if charged[key] or restored[key] or (stored[key] == 'stale' and charge) then
    save(key, counter, now)
    charged[key], restored[key], stored[key] = nil, nil, nil
  elseif stored[key] then
    repair_ttl(key, counter, now)
    stored[key] = nil
  end
  local at = #reply
  if cell.kind == LOG then
    reply[at + 1], reply[at + 2] = cell.outcome, logged(counter, now)
    reply[at + 3], reply[at + 4] = cell.wait, log_reset(counter, now)
  else
    reply[at + 1], reply[at + 2], reply[at + 3] = cell.outcome, counter[INDEX], counter[PREVIOUS]
    reply[at + 4] = counter[CURRENT]
    if cell.kind == BUCKET then reply[at + 3], reply[at + 4] = math.fmod(counter[TAT_NS], 1000), cell.lacked end
  end
end
return reply
