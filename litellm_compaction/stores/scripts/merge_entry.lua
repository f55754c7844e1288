-- Keeps a body if what is under the key is what it was made from; else returns what is there.
-- KEYS: the entry. ARGV: now_s, alive_since_s, ttl_ms, the body that was read ("" for none), the new one, most_bytes:
-- what is larger is nobody's here, and is replaced unread.
-- Returns nothing (false) if it was kept, else the body, "" for none.
-- A full server refuses the first write of a script only (Redis 7.0, script.c), so nothing is written before the body.
local size = redis.pcall('HSTRLEN', KEYS[1], 'body')
if type(size) == 'number' and size > tonumber(ARGV[6]) then
  redis.call('DEL', KEYS[1])
end
local entry = redis.pcall('HMGET', KEYS[1], 'body', 'used_s')
local kept = ''
if entry.err then
  redis.call('DEL', KEYS[1])
elseif entry[1] and (tonumber(entry[2] or nil) or 0) >= tonumber(ARGV[2]) then
  kept = entry[1]
end
if kept ~= ARGV[4] then
  return kept
end
redis.call('HSET', KEYS[1], 'body', ARGV[5], 'created_s', ARGV[1], 'used_s', ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return false
