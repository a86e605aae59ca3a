-- keys_merge.lua: adds keys to the key store, and ends keys, all of them or none.
-- KEYS[1] entries  KEYS[2] order  KEYS[3] meta, as in keys_read.lua
-- ARGV[1] epoch, for a store that has none  ARGV[2] secret, or '' where no key is added  ARGV[3] now, in epoch seconds
-- then for each key: condition, id, record in JSON (client, plan, created, expires, disabled; each may be absent), or ''
-- to give what is there its place in the order, if it has none
-- Returns { 'ok', then for each key: 1 if anything changed or 0, record after it },
--         or what hinders it, and nothing is changed: { 'secret' }, { 'missing', id }, { 'ended', id }, { 'taken', id },
--         { 'unreadable', id }; a key that is to get a place and is not there is left out
-- Conditions: 'new', there is no such key; 'known', there is; 'valid', there is, and it has not ended; 'any'.
-- A key only ever moves towards its end: disabled stays, and of two ends the earlier one holds. So whatever the order in
-- which hosts say what they know, the outcome is the same, and nobody brings an ended key back.

local entries, order, meta = KEYS[1], KEYS[2], KEYS[3]
local epoch, secret, now = ARGV[1], ARGV[2], tonumber(ARGV[3])

local stored_secret = redis.call('HGET', meta, 'secret')
if secret ~= '' and stored_secret and stored_secret ~= secret then
  return { 'secret' }
end

local changes = {}
for at = 4, #ARGV, 3 do
  local condition, id, record = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  local text = redis.call('HGET', entries, id)
  local stored
  if text then
    local is_read, value = pcall(cjson.decode, text)
    if is_read and type(value) == 'table' then
      stored = value
    elseif condition ~= 'any' then
      return { 'unreadable', id }
    end
  end
  if condition == 'new' and text then
    return { 'taken', id }
  end
  if (condition == 'known' or condition == 'valid') and not stored then
    return { 'missing', id }
  end
  local ends = stored and tonumber(stored.expires)
  if condition == 'valid' and (stored.disabled == true or (ends and ends <= now)) then
    return { 'ended', id }
  end
  local given = record ~= '' and cjson.decode(record)
  if given or text then
    changes[#changes + 1] = { id = id, text = text, stored = stored, ends = ends, given = given }
  end
end

if not redis.call('HGET', meta, 'epoch') then
  -- Where the order is still there, positions go on behind it.
  local last = redis.call('ZREVRANGE', order, 0, 0, 'WITHSCORES')
  redis.call('HSET', meta, 'epoch', epoch, 'position', last[2] or '0')
end
if secret ~= '' and not stored_secret then
  redis.call('HSET', meta, 'secret', secret)
end

local reply = { 'ok' }
for _, change in ipairs(changes) do
  local given, merged = change.given, change.stored or {}
  local is_changed = (given and not change.stored) or not redis.call('ZSCORE', order, change.id)
  for name, value in pairs(given or {}) do
    if name == 'disabled' then
      if value == true and merged.disabled ~= true then
        merged.disabled = true
        is_changed = true
      end
    elseif name == 'expires' then
      if not change.ends or value < change.ends then
        merged.expires = value
        is_changed = true
      end
    elseif merged[name] == nil then
      merged[name] = value
      is_changed = true
    end
  end
  local text = change.text
  if is_changed then
    if given then
      text = cjson.encode(merged)
      redis.call('HSET', entries, change.id, text)
    end
    redis.call('ZADD', order, redis.call('HINCRBY', meta, 'position', 1), change.id)
  end
  reply[#reply + 1] = is_changed and 1 or 0
  reply[#reply + 1] = text
end
return reply
