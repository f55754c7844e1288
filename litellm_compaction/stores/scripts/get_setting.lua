-- Returns a setting's body, False for none, or its size where it is larger than any that is written.
-- KEYS: all settings. ARGV: the setting, most_bytes.
local size = redis.call('HSTRLEN', KEYS[1], ARGV[1])
if size > tonumber(ARGV[2]) then
  return size
end
return redis.call('HGET', KEYS[1], ARGV[1])
