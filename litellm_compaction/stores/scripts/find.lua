-- Returns index, body, created_s, used_s of the rows that are alive, in the order of KEYS.
-- KEYS: rows of one scope. ARGV: now_s, or an empty string for the server's time; ttl_s, or an empty string for no end;
-- most_bytes of all bodies together (one is always found); most_bytes of one: a larger one was not written here, and is
-- deleted unread; '1' if this is a use of them.
-- Hardly any key is there, so that a few are asked for at a time: a call costs more than what it does.
-- A server that is full or read-only refuses to note the use (pcall), and still finds.
local time = redis.call('TIME')
local now_s = tonumber(ARGV[1]) or time[1] + time[2] / 1e6
local ttl_s, most_bytes, most_of_one = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local at_once = 16
local found, bytes = {}, 0
for first = 1, #KEYS, at_once do
  local last = math.min(first + at_once - 1, #KEYS)
  local count = redis.call('EXISTS', unpack(KEYS, first, last))
  for index = first, count > 0 and last or 0 do
    local key = KEYS[index]
    local size = redis.pcall('HSTRLEN', key, 'body')
    if type(size) == 'number' and size > most_of_one then
      redis.pcall('DEL', key)
    end
    local row = redis.pcall('HMGET', key, 'body', 'created_s', 'used_s')
    local body, created_s, used_s = row[1], tonumber(row[2] or nil), tonumber(row[3] or nil)
    if body and created_s and used_s then
      if ttl_s and used_s < now_s - ttl_s then
        redis.pcall('DEL', key)
      else
        bytes = bytes + #body
        if #found > 0 and bytes > most_bytes then
          return found
        end
        for _, value in ipairs({index, body, row[2], row[3]}) do
          found[#found + 1] = value
        end
        if ttl_s and ARGV[5] == '1' then
          if used_s < now_s then
            redis.pcall('HSET', key, 'used_s', string.format('%.17g', now_s))
          end
          redis.pcall('PEXPIRE', key, math.floor(ttl_s * 1000))
        end
      end
    end
  end
end
return found
