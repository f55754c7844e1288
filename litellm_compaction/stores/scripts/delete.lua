-- Deletes the rows that were last used before a time, or at any time; returns which of KEYS, as indices.
-- KEYS: what may be rows of one scope. ARGV: before_s, or an empty string.
local deleted = {}
for index, key in ipairs(KEYS) do
  local used_s = redis.pcall('HGET', key, 'used_s')
  if type(used_s) == 'string' and (ARGV[1] == '' or (tonumber(used_s) or 0) < tonumber(ARGV[1])) then
    redis.call('DEL', key)
    deleted[#deleted + 1] = index
  end
end
return deleted
