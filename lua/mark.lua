-- mark.lua: shows the mark of a server, which nodes keep there together and which goes when the server loses what it had.
-- KEYS[1] the mark's key, in a slot of the server (single key: cluster safe)
-- ARGV[1] another mark, to be put there where there is none  ARGV[2] for how long the mark lasts, in milliseconds
-- Returns the mark that is there: who finds another one than before knows that what was there before is lost

local mark = redis.pcall('GET', KEYS[1])
if type(mark) ~= 'string' then mark = ARGV[1] end
redis.call('SET', KEYS[1], mark, 'PX', ARGV[2])
return mark
