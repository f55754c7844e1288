-- Returns body, created_s, used_s of each entry that is there, and False three times for the others.
-- KEYS: entries of one scope.
local found = {}
for _, key in ipairs(KEYS) do
  local entry = redis.pcall('HMGET', key, 'body', 'created_s', 'used_s')
  for field = 1, 3 do
    found[#found + 1] = entry[field] or false
  end
end
return found
