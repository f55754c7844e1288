-- Returns the bodies of the plots since a time that contain these characters, the newest first.
-- KEYS: bodies by plot, times by plot. ARGV: since_s, characters, most_bytes of a body.
local found = {}
local newest = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', string.format('%.17g', -tonumber(ARGV[1])))
for _, plot in ipairs(newest) do
  local body = redis.call('HSTRLEN', KEYS[1], plot) <= tonumber(ARGV[3]) and redis.call('HGET', KEYS[1], plot)
  if body and string.find(body, ARGV[2], 1, true) then
    found[#found + 1] = body
  end
end
return found
