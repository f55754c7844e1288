-- Keeps a body in place of whatever was under the key.
-- KEYS: the entry. ARGV: now_s, ttl_ms, body.
-- A full server refuses the first write of a script only (Redis 7.0, script.c), so nothing is written before the body.
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'none' and kind ~= 'hash' then
  redis.call('DEL', KEYS[1])
end
redis.call('HSET', KEYS[1], 'body', ARGV[3], 'created_s', ARGV[1], 'used_s', ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
