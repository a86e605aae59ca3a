-- sliding_window.lua: decide one request over all of its counters, and charge all of them or none.
-- KEYS[1..n] counters, e.g. rl:{user:u_1}:login   (one request's counters of one identity share a hash tag)
-- ARGV[1] now_us (0: the server's TIME)  ARGV[2] charge 1, or 0 for a peek
-- ARGV[4i-1..4i+2], a counter each: window_us, ceiling, cost, enforced 1|0 (0: shadow, its denial changes nothing)
-- Returns { now_us, replaced, then a counter each: outcome 1 allowed | 0 denied | -1 never, index, previous, current }
-- Counts are those after the decision; `replaced` is how many keys held something that is no counter.
-- Remaining, reset and retry_after follow from the counts; the agent computes them, so they are defined once.
-- Integers up to 2^53 - 1; greater ceilings are taken as that, greater costs can never be allowed.

local now_us = argument(1)
if now_us == 0 then now_us = time_us() end
local charge = argument(2) == 1

local counters, stored, replaced = {}, {}, 0
local cells, passes = {}, true

for i, key in ipairs(KEYS) do
  local at = 4 * i - 1
  local window_us = math.min(argument(at), MAX)
  local cell = { ceiling = math.min(argument(at + 1), MAX), cost = argument(at + 2), enforced = argument(at + 3) == 1 }
  cells[i] = cell
  if not counters[key] then
    local was_replaced
    counters[key], stored[key], was_replaced = load(key, window_us, now_us)
    if was_replaced then replaced = replaced + 1 end
  end
  -- A counter that appears twice has to hold the sum. A shadow cell takes nothing from an enforced one.
  local taken = 0
  for j = 1, i - 1 do
    if KEYS[j] == key and cells[j].outcome == 1 and (cells[j].enforced or not cell.enforced) then
      taken = taken + cells[j].cost
    end
  end
  if cell.cost > cell.ceiling then
    cell.outcome = -1
  elseif estimate(counters[key], now_us) + taken <= cell.ceiling - cell.cost then
    cell.outcome = 1
  else
    cell.outcome = 0
  end
  if cell.enforced and cell.outcome ~= 1 then passes = false end
end

local charged = {}
if passes and charge then
  for i, key in ipairs(KEYS) do
    if cells[i].outcome == 1 then
      counters[key][CURRENT] = math.min(counters[key][CURRENT] + cells[i].cost, MAX)
      charged[key] = true
    end
  end
end

local reply = { now_us, replaced }
for i, key in ipairs(KEYS) do
  local counter = counters[key]
  if charged[key] or (stored[key] == 'stale' and charge) then
    save(key, counter)
    charged[key], stored[key] = nil, nil
  elseif stored[key] then
    repair_ttl(key, counter)
    stored[key] = nil
  end
  local at = #reply
  reply[at + 1], reply[at + 2] = cells[i].outcome, counter[INDEX]
  reply[at + 3], reply[at + 4] = counter[PREVIOUS], counter[CURRENT]
end
return reply
