-- Returns body, created_s, used_s of each entry that is there, and False three times for the others.
-- KEYS: entries of one scope. ARGV: most_bytes of a body; a larger one is nobody's here.
local found = {}
for _, key in ipairs(KEYS) do
  local size = redis.pcall('HSTRLEN', key, 'body')
  local entry = {}
  if type(size) == 'number' and size <= tonumber(ARGV[1]) then
    entry = redis.pcall('HMGET', key, 'body', 'created_s', 'used_s')
  end
  for field = 1, 3 do
    found[#found + 1] = entry[field] or false
  end
end
return found
