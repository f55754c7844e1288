-- Adds a line to a log under a number above all before: the server's microseconds, so that it grows even if the log
-- was lost with the server's memory.
-- KEYS: the stream, the last number. ARGV: when_s, body, how many lines are kept, ttl_ms.
local time = redis.call('TIME')
local number = tonumber(time[1]) * 1000000 + tonumber(time[2])
local last = tonumber(redis.call('GET', KEYS[2]) or nil)
if last and last >= number then
  number = last + 1
end
local id = string.format('%.0f', number)
redis.call('XADD', KEYS[1], 'MAXLEN', ARGV[3], id .. '-0', 'when_s', ARGV[1], 'body', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('SET', KEYS[2], id)
return id
