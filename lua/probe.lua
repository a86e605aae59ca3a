-- probe.lua: does what counting needs, and changes nothing: whoever answers it can be shared with again.
-- KEYS[1] a key that is not there, in a slot of the server (single key: cluster safe)
-- ARGV none
-- Returns 1, or the error of the command that hinders it: a server that is full, that is no primary, that lacks replicas

redis.call('SET', KEYS[1], '', 'XX', 'PX', '1')
return 1
