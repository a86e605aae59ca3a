-- keys_read.lua: what has changed in the key store behind a position, a page at a time.
-- KEYS[1] entries: hash, id of a key -> its record in JSON   KEYS[2] order: sorted set, id -> position of its last change
-- KEYS[3] meta: hash with epoch, position and secret (the three share the tag {keys}: cluster safe)
-- ARGV[1] position behind which to read, 0 for everything  ARGV[2] most entries
-- Returns { epoch, position of the last change, number of entries, number in the order, secret, then for each entry, in the order of changes:
--           id, position, record }; '' for what is not there
-- Epochs and secrets are compared, never understood: the first is drawn by whoever wrote to an empty store, the second
-- is a keyed hash that tells whether two hosts hash keys alike.

local meta = redis.call('HMGET', KEYS[3], 'epoch', 'position', 'secret')
local reply = { meta[1] or '', meta[2] or '0', redis.call('HLEN', KEYS[1]), redis.call('ZCARD', KEYS[2]), meta[3] or '' }
local changed = redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. ARGV[1], '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[2])
for at = 1, #changed, 2 do
  local id = changed[at]
  reply[#reply + 1] = id
  reply[#reply + 1] = changed[at + 1]
  reply[#reply + 1] = redis.call('HGET', KEYS[1], id) or ''
end
return reply
