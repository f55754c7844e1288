-- Keeps a body in place of whatever was under the key.
-- KEYS: the entry. ARGV: now_s, ttl_ms, body.
if redis.call('TYPE', KEYS[1]).ok ~= 'hash' then
  redis.call('DEL', KEYS[1])
end
redis.call('HSET', KEYS[1], 'body', ARGV[3], 'created_s', ARGV[1], 'used_s', ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
