-- heartbeat.lua: one node says that it is alive, and hears how many are.
-- KEYS[1] rl:{nodes}:live, the same for all nodes (single key: cluster safe)
-- ARGV[1] name of this run of the node  ARGV[2] for how long it counts as alive, in milliseconds; 0: it leaves
-- Returns { now_us, alive }: this server's time, and the nodes that are alive, the one that asks among them unless it leaves
-- Alive is who has said so lately by this server's clock, so nodes need not agree on the time. The value is a flat array in
-- MessagePack: name, end in microseconds since 1970, of each node.

local MOST_NODES, LONGEST_US = 4096, 600000000

local name, lasts_us = ARGV[1], math.min(assert(tonumber(ARGV[2]), 'argument 2') * 1000, LONGEST_US)
local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]

local stored, nodes = redis.pcall('GET', KEYS[1]), {}
if type(stored) == 'string' then
  local decoded, value = pcall(cmsgpack.unpack, stored)
  if decoded and type(value) == 'table' then nodes = value end
elseif stored and stored.err then
  if not string.find(stored.err, 'WRONGTYPE', 1, true) then error(stored.err) end
  redis.call('DEL', KEYS[1])
end

local live, last_us = {}, now_us
local function keep(node, end_us)
  live[#live + 1], live[#live + 2] = node, end_us
  last_us = math.max(last_us, end_us)
end

if lasts_us > 0 then keep(name, now_us + lasts_us) end
for at = 1, #nodes, 2 do
  local node, end_us = nodes[at], nodes[at + 1]
  local is_record = type(node) == 'string' and type(end_us) == 'number'
  -- A clock that was ahead has left ends that nobody would live to see.
  if is_record and node ~= name and end_us > now_us and end_us <= now_us + LONGEST_US and #live < 2 * MOST_NODES then
    keep(node, end_us)
  end
end

if #live > 0 then
  redis.call('SET', KEYS[1], cmsgpack.pack(live), 'PX', string.format('%.0f', math.ceil((last_us - now_us) / 1000)))
elseif stored then
  redis.call('DEL', KEYS[1])
end
return { now_us, #live / 2 }
