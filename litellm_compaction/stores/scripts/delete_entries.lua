-- Deletes entries that were last used before a time, or at any time; returns how many of the first ones there were.
-- KEYS: entries of one scope. ARGV: before_s, or an empty string; how many of KEYS are counted.
local count = 0
for index, key in ipairs(KEYS) do
  local used_s = redis.pcall('HGET', key, 'used_s')
  local is_due = ARGV[1] == ''
  if not is_due and type(used_s) == 'string' then
    is_due = (tonumber(used_s) or 0) < tonumber(ARGV[1])
  end
  if is_due and redis.call('DEL', key) == 1 and index <= tonumber(ARGV[2]) then
    count = count + 1
  end
end
return count
