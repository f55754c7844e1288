-- Returns the bodies of the entries that are alive, in the order of KEYS, and notes that they were used.
-- KEYS: entries of one scope. ARGV: now_s, alive_since_s, ttl_ms, most_bytes of all bodies together (one is always found),
-- most_bytes of one: a larger one is nobody's here, and is deleted unread.
-- Hardly any key is there, so that a few are asked for at a time: a call costs more than what it does.
-- A server that is full or read-only refuses the note (pcall), and still finds.
local now_s, alive_since_s, most_bytes = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[4])
local most_of_one = tonumber(ARGV[5])
local at_once = 16
local bodies, bytes = {}, 0
for first = 1, #KEYS, at_once do
  local last = math.min(first + at_once - 1, #KEYS)
  local count = redis.call('EXISTS', unpack(KEYS, first, last))
  for index = first, count > 0 and last or 0 do
    local key = KEYS[index]
    local size = redis.pcall('HSTRLEN', key, 'body')
    if type(size) == 'number' and size > most_of_one then
      redis.pcall('DEL', key)
    end
    local entry = redis.pcall('HMGET', key, 'body', 'used_s')
    local body, used_s = entry[1], tonumber(entry[2] or nil)
    if body and used_s and used_s < alive_since_s then
      redis.pcall('DEL', key)
    elseif body and used_s then
      bytes = bytes + #body
      if #bodies > 0 and bytes > most_bytes then
        return bodies
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
