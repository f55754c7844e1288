-- Deletes the lines from before a time among the next few; returns the highest number it looked at, False at the end.
-- KEYS: the stream. ARGV: the lowest number to look at, how many to look at, before_s.
local lines = redis.call('XRANGE', KEYS[1], ARGV[1], '+', 'COUNT', ARGV[2])
for _, line in ipairs(lines) do
  if tonumber(line[2][2]) < tonumber(ARGV[3]) then
    redis.call('XDEL', KEYS[1], line[1])
  end
end
if #lines < tonumber(ARGV[2]) then
  return false
end
return lines[#lines][1]
