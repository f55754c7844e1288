-- Returns the bodies of the entries that are alive, in the order of KEYS, and notes that they were used.
-- KEYS: entries of one scope. ARGV: now_s, alive_since_s, ttl_ms, most_bytes of all bodies together (one is always found).
-- A server that is full or read-only refuses the note (pcall), and still finds.
local now_s, alive_since_s, most_bytes = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[4])
local bodies, bytes = {}, 0
for _, key in ipairs(KEYS) do
  local entry = redis.pcall('HMGET', key, 'body', 'used_s')
  local body, used_s = entry[1], tonumber(entry[2] or nil)
  if body and used_s then
    if used_s < alive_since_s then
      redis.pcall('DEL', key)
    else
      bytes = bytes + #body
      if #bodies > 0 and bytes > most_bytes then
        break
      end
      bodies[#bodies + 1] = body
      if used_s < now_s then
        redis.pcall('HSET', key, 'used_s', ARGV[1])
      end
      redis.pcall('PEXPIRE', key, ARGV[3])
    end
  end
end
return bodies
