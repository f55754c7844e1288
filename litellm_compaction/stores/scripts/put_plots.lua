-- Keeps plots, each in place of an earlier one; the oldest and those from before a time go.
-- KEYS: bodies by plot, times by plot (negative, so that the newest is first). ARGV: before_s, most, ttl_ms, then
-- plot, when_s, body of each.
for index = 4, #ARGV, 3 do
  redis.call('HSET', KEYS[1], ARGV[index], ARGV[index + 2])
  redis.call('ZADD', KEYS[2], -tonumber(ARGV[index + 1]), ARGV[index])
end
local doomed = redis.call('ZRANGE', KEYS[2], ARGV[2], -1)
for _, plot in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. string.format('%.17g', -tonumber(ARGV[1])), '+inf')) do
  doomed[#doomed + 1] = plot
end
for _, plot in ipairs(doomed) do
  redis.call('HDEL', KEYS[1], plot)
  redis.call('ZREM', KEYS[2], plot)
end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return #doomed
