-- Replaces a row if what is there is what was read before, or whatever is there; else tells what is there.
-- KEYS: the row. ARGV: now_s, or an empty string for the server's time; ttl_s, or an empty string for no end; most_bytes
-- of a body: a larger one was not written here, and is replaced unread; 'look', 'put' or 'swap'; the new body, an empty
-- string to delete the row; for 'swap' the body that was read, an empty string for none.
-- Returns nothing (false) if the row was replaced, else now_s and the body that is there, an empty string for none.
-- A full server refuses the first write of a script only (Redis 7.0, script.c), so nothing is written before the body.
local time = redis.call('TIME')
local now_s = tonumber(ARGV[1]) or time[1] + time[2] / 1e6
local ttl_s, key, way = tonumber(ARGV[2]), KEYS[1], ARGV[4]
local now = string.format('%.17g', now_s)
local size = redis.pcall('HSTRLEN', key, 'body')
local kept = ''
if type(size) ~= 'number' or size > tonumber(ARGV[3]) then
  if way ~= 'look' then
    redis.call('DEL', key)
  end
elseif way ~= 'put' then
  local row = redis.call('HMGET', key, 'body', 'used_s')
  if row[1] and (not ttl_s or (tonumber(row[2] or nil) or 0) >= now_s - ttl_s) then
    kept = row[1]
  end
end
if way == 'look' or (way == 'swap' and kept ~= ARGV[6]) then
  return {now, kept}
end
if ARGV[5] == '' then
  redis.call('DEL', key)
  return false
end
redis.call('HSET', key, 'body', ARGV[5], 'created_s', now, 'used_s', now)
if ttl_s then
  redis.call('PEXPIRE', key, math.floor(ttl_s * 1000))
else
  redis.call('PERSIST', key)
end
return false
